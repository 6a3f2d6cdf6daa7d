"""Elastic weight consolidation (Kirkpatrick et al. 2017): a diagonal Fisher, as a penalty in the gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from retention.method import Bench, During


def protect(bench: Bench, model: Any, optimizer: Any, value: float) -> AbstractContextManager[Any]:
    """Training with the penalty, whose Fisher is that of the model's own samples."""
    memory = bench.diagonal_memory(model, value)
    context: AbstractContextManager[Any] = memory.protect(optimizer, examples=bench.examples, mode="gradient")
    return context


METHOD = During(
    "diagonal EWC",
    "old data or own samples, once",
    candidates=(0.1, 1.0, 10.0, 100.0),
    chosen={"vision": 1.0},
    protect=protect,
    memory=True,
)
