"""TIES (Yadav et al. 2023) of a single update: its smallest entries are set to zero, and the rest is scaled.

peft's `add_weighted_adapter` trims only if there are several adapters, so this merges the trimmed update itself. With
one update there are no signs to elect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from retention.method import After, Bench, Go
from retention.update import changing

DENSITY = 0.2  # the share of entries that is kept, as in the paper


def trimmed(update: Tensor) -> Tensor:
    """Return the update with its smallest entries set to zero."""
    kept = max(int(DENSITY * update.numel()), 1)
    return update * (update.abs() >= update.abs().flatten().topk(kept).values[-1])


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """The trimmed update, at several weights."""
    layers = bench.updates(model)
    kept = {layer.name: trimmed(layer.update) for layer in layers}
    with changing(layers) as change:
        yield lambda weight: change(lambda layer: weight * kept[layer.name])


METHOD = After("TIES", "nothing", path, settings=(1.0, 0.8, 0.6, 0.4), default=1.0)
