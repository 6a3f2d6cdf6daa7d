"""TIES (Yadav et al. 2023) of a single update: its smallest entries are set to zero.

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


def trimmed(update: Tensor, density: float) -> Tensor:
    """Return the update with its smallest entries set to zero, except for this share of it."""
    kept = max(int(density * update.numel()), 1)
    return update * (update.abs() >= update.abs().flatten().topk(kept).values[-1])


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """From almost all entries to few of them."""
    with changing(bench.updates(model)) as change:
        yield lambda density: change(lambda layer: trimmed(layer.update, density))


DEFAULT = 0.2
"""The density that the paper recommends."""

METHOD = After(
    "TIES",
    "nothing",
    path,
    settings=(0.9, 0.8, 0.6, 0.4, DEFAULT, 0.1, 0.05, 0.02, 0.01),
    default=DEFAULT,
    chosen={"sequence": 0.1},
)
