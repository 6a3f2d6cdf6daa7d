"""Marker for data that is replicated on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReplicatedBatches(Iterable[Any]):
    """All batches of a task, identical and in the same order on every rank; the ranks process them in turn.

    Without this wrapper, `consolidate` treats the batches of each rank as that rank's share of the data. With it, every
    batch has the same index on all ranks, so an interrupted pass can be resumed on a different number of ranks:

        memory.consolidate(limpet.distributed.ReplicatedBatches(batches), checkpoint="pass.safetensors")

    Args:
        batches: The batches of all ranks.
    """

    batches: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
