"""Uniform scaling of the update: weights between before and after, as in WiSE-FT (Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retention.after.adapters import scaled
from retention.method import After, Bench

SCALES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def points(_: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """From the trained weights towards those before."""
    for scale in SCALES:
        with scaled(model, lambda _: scale):  # noqa: B023
            yield {"scale": scale}


METHOD = After("scaling", "nothing", points, after=("plain", "self-rehearsal"))
