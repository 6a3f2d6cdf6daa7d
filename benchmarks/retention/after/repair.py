"""`limpet.repair`, at several strengths; 1 is the default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retention.method import After, Bench, Go


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """From weak to strong."""
    found = bench.repaired(model, strength=0.0)

    def go(strength: float) -> None:
        found.at(strength)

    try:
        yield go
    finally:
        found.undo()


METHOD = After(
    "repair",
    "old data or own samples, once",
    path,
    settings=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    default=1.0,
    after=("plain", "self-rehearsal", "distillation"),
    memory=True,
    chosen={"sequence": 3.0},
)
