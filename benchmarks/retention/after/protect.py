"""`memory.protect` with its defaults, whose training is plain, and whose repair uses what it has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limpet.methods.repair_pass import DRIFT
from retention.method import After, Bench, Go


@contextmanager
def path(bench: Bench, model: Any) -> Iterator[Go]:
    """Where it ends."""
    found = bench.repaired(model, budget="auto", tolerance="auto")

    def go(_: float) -> None:
        """It is there already."""

    try:
        yield go
    finally:
        found.undo()


METHOD = After(
    "protect",
    "old data or own samples, once",
    path,
    settings=(DRIFT,),  # the largest budget that it may have
    default=DRIFT,
    memory=True,
)
