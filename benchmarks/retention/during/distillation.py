"""Learning without forgetting (Li and Hoiem 2016): KL(before || now) on the new examples."""

from __future__ import annotations

from typing import Any

from retention.method import Bench, During, Extra


def extra(bench: Bench, model: Any, value: float) -> Extra:
    """The divergence, times a weight."""
    return lambda batch, outputs: value * bench.distilled(model, batch, outputs)


METHOD = During(
    "distillation",
    "nothing; the model before",
    candidates=(0.1, 0.3, 1.0),
    chosen={"vision": 0.3, "language": 0.3, "sequence": 1.0},
    extra=extra,
)
