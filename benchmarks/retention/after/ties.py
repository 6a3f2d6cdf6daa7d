"""TIES (Yadav et al. 2023) of a single update: its smallest entries are set to zero, and the rest is scaled.

peft's `add_weighted_adapter` trims only if there are several adapters, so this merges the trimmed update itself. With
one update there are no signs to elect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from retention.after.adapters import layers, scaled
from retention.method import After, Bench

DENSITY = 0.2  # the share of entries that is kept, as in the paper
WEIGHTS = (1.0, 0.8, 0.6, 0.4)


def trimmed(update: Tensor) -> Tensor:
    """Return the update with its smallest entries set to zero."""
    kept = max(int(DENSITY * update.numel()), 1)
    return update * (update.abs() >= update.abs().flatten().topk(kept).values[-1])


@torch.no_grad()
def points(_: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """The trimmed update, at several weights, merged into the base."""
    found = [layer for _, layer in layers(model)]
    before = [layer.get_base_layer().weight.clone() for layer in found]
    updates = [trimmed(layer.get_delta_weight(layer.active_adapters[0])) for layer in found]
    try:
        with scaled(model, lambda _: 0.0):
            for weight in WEIGHTS:
                for layer, base, update in zip(found, before, updates, strict=True):
                    layer.get_base_layer().weight.copy_(base + weight * update)
                yield {"weight": weight, "density": DENSITY}
    finally:
        for layer, base in zip(found, before, strict=True):
            layer.get_base_layer().weight.copy_(base)


METHOD = After("TIES", "nothing", points)
