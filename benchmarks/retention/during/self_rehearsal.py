"""KL(before || now) on samples of the model before (`limpet.SelfRehearsal`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import limpet
from retention.method import Bench, During


def protect(bench: Bench, model: Any, optimizer: Any, value: float) -> AbstractContextManager[Any]:
    """Training with four samples in every step."""
    memory = limpet.SelfRehearsal(model, weight=value, seed=bench.seed)
    rows = bench.rehearsed()
    with bench.preparing():
        memory.consolidate(rows)
    bench.kept["megabytes"] = round(memory.nbytes / 1e6, 1)
    return memory.protect(optimizer)


METHOD = During("self-rehearsal", "own samples", candidates=(0.3, 1.0, 3.0, 10.0), protect=protect)
