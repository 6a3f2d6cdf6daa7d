"""Data that every rank is given alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReplicatedBatches(Iterable[Any]):
    """All batches of a task, the same on every rank and in the same order: each rank takes those that are its turn.

    A pass over such data can be stopped and go on, on any number of ranks, because every batch has one number for all:

        memory.consolidate(limpet.distributed.ReplicatedBatches(batches), checkpoint="pass.safetensors")

    Without it, `consolidate` takes the batches of each rank as that rank's own share.
    """

    batches: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
