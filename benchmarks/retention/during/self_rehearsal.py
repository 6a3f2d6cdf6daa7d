"""KL(before || now) on samples of the model before (`limpet.SelfRehearsal`): four in every step, or one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import limpet
from retention.method import Bench, During

WEIGHT = 3.0
"""Chosen with four samples, for language models."""


def protect(bench: Bench, model: Any, optimizer: Any, value: float, rows: int) -> AbstractContextManager[Any]:
    """Training with so many samples in every step."""
    memory = limpet.SelfRehearsal(model, weight=value, batch_size=rows, seed=bench.seed)
    drawn = bench.rehearsed()
    with bench.preparing():
        memory.consolidate(drawn)
    bench.kept["megabytes"] = round(memory.nbytes / 1e6, 1)
    return memory.protect(optimizer)


METHODS = (
    During(
        "self-rehearsal",
        "old data or own samples",
        candidates=(0.3, 1.0, 3.0, 10.0),
        chosen={"language": WEIGHT},
        protect=partial(protect, rows=4),
    ),
    During("self-rehearsal of one row", "old data or own samples", fixed=WEIGHT, protect=partial(protect, rows=1)),
)
