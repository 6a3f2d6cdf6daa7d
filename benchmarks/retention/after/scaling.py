"""Uniform scaling of the update: weights between before and after, as in WiSE-FT (Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retention.method import After, Bench, Go
from retention.update import changing


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """From the trained weights towards those before."""
    with changing(bench.updates(model)) as change:
        yield lambda scale: change(lambda layer: scale * layer.update)


METHOD = After(
    "scaling",
    "nothing",
    path,
    settings=(0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0),
    after=("plain", "self-rehearsal", "distillation"),
    chosen={"sequence": 0.5},
)
