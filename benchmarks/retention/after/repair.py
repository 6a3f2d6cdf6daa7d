"""`limpet.repair`, at several strengths; 1 is the default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retention.method import After, Bench

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def points(bench: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """From weak to strong."""
    path = bench.repaired(model, strength=0.0)
    try:
        for strength in STRENGTHS:
            path.at(strength)
            yield {"strength": strength}
    finally:
        path.undo()


METHOD = After("repair", "own samples, once", points, after=("plain", "self-rehearsal"))
