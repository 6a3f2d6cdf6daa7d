"""Elastic weight consolidation (Kirkpatrick et al. 2017): a penalty with the diagonal Fisher is added to the loss.

The penalty is divided by the number of new examples, so that the strength is relative to the sum of their losses.
"""

from __future__ import annotations

from typing import Any

from retention.method import Bench, During, Extra


def extra(bench: Bench, model: Any, value: float) -> Extra:
    """The penalty, times a strength."""
    memory = bench.diagonal_memory(model)
    return lambda *_: value / bench.examples * memory.penalty()


METHOD = During(
    "diagonal EWC",
    "old data or own samples, once",
    candidates=(0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6),
    chosen={"vision": 0.1, "sequence": 1e5},
    extra=extra,
    memory=True,
)
