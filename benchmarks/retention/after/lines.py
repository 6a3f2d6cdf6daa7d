"""LiNeS (Wang et al. 2024): the update of a layer is scaled by a factor that grows linearly with its depth.

The last layer keeps its update, and the first gets the factor alpha.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retention.method import After, Bench, Go
from retention.update import changing, depths


def factor(depth: int, first: float, last: int) -> float:
    """Return alpha + (1 - alpha) l / (L - 1), for the layer l of L.

    Args:
        depth: The depth of the layer, l.
        first: The factor of the first layer, alpha.
        last: The depth of the last layer, L - 1.

    Returns:
        The factor.
    """
    return first + (1 - first) * depth / max(last, 1)


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """From the trained weights on, less and less of the first layers."""
    layers = bench.updates(model)
    depth = depths([layer.name for layer in layers])
    last = max(depth.values())
    with changing(layers) as change:
        yield lambda first: change(lambda layer: factor(depth[layer.name], first, last) * layer.update)


METHOD = After("LiNeS", "nothing", path, settings=(0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0), chosen={"sequence": 0.2})
