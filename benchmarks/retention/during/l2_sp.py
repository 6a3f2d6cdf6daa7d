"""L2-SP (Li et al. 2018): half a factor times the squared distance of the weights from where they were."""

from __future__ import annotations

from typing import Any

from retention.method import Bench, During, Extra


def extra(bench: Bench, model: Any, value: float) -> Extra:
    """The penalty."""
    return lambda *_: 0.5 * value * bench.displaced(model)


METHOD = During(
    "L2-SP",
    "nothing",
    candidates=(1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    chosen={"vision": 1e-4, "language": 1e-2, "sequence": 1.0},
    extra=extra,
)
