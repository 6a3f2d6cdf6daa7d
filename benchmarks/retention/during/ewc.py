"""Elastic weight consolidation (Kirkpatrick et al. 2017): a diagonal Fisher, as a penalty in the gradients.

The penalty is divided by the number of new examples, so with N / strength of them a memory of strength 1 serves for
every strength.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from retention.method import Bench, During


def protect(bench: Bench, model: Any, optimizer: Any, value: float) -> AbstractContextManager[Any]:
    """Training with the penalty at a strength."""
    examples = round(bench.examples / value)
    context: AbstractContextManager[Any] = bench.diagonal_memory(model).protect(
        optimizer, examples=examples, mode="gradient"
    )
    return context


METHOD = During(
    "diagonal EWC",
    "old data or own samples, once",
    candidates=(0.1, 1.0, 10.0, 100.0),
    chosen={"vision": 1.0},
    protect=protect,
    memory=True,
)
