"""LiNeS (Wang et al. 2024): the update of a layer is scaled by a factor that grows linearly with its depth.

The last layer keeps its update, and the first gets the factor alpha.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from retention.after.adapters import depth, scaled
from retention.method import After, Bench

FIRST = (0.8, 0.6, 0.4, 0.2, 0.0)


def factor(name: str, first: float, layers: int) -> float:
    """Return alpha + (1 - alpha) l / (L - 1), for the layer l of L.

    Args:
        name: The name of a parameter.
        first: The factor of the first layer, alpha.
        layers: The number of layers, L.

    Returns:
        The factor.
    """
    return first + (1 - first) * depth(name) / max(layers - 1, 1)


def points(_: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """From the trained weights on, less and less of the first layers."""
    layers = 1 + max(depth(name) for name, _ in model.named_parameters() if "lora_B" in name)
    for first in FIRST:
        with scaled(model, partial(factor, first=first, layers=layers)):
            yield {"first": first}


METHOD = After("LiNeS", "nothing", points)
