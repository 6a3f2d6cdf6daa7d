"""`memory.protect` with its defaults, whose training is plain, and whose repair uses what it has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from limpet.methods.laplace import DRIFT
from retention.method import After, Bench

DEFAULT = {"budget": DRIFT, "tolerance": "auto"}


def points(bench: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """Where it ends."""
    path = bench.repaired(model, **DEFAULT)
    try:
        yield {"strength": path.strength}
    finally:
        path.undo()


METHOD = After("protect", "own samples, once", points)
