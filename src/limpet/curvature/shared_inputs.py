"""Layers that read the same tensor have the same input factor: it is made once a batch, and added to the sums of each.

In a transformer query, key and value read one tensor, and gate and up another. Nothing is told by names: two calls read
the same input when their data are the same memory, seen in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from limpet.curvature.gram import add_gram
from limpet.layers import Call, MatrixLayer
from limpet.precision import Matrix
from limpet.precision.block_diagonal import joined, pieces

FEWEST_ROWS = 32
"""Rows from which on adding a matrix that is there is sooner done than making it again."""


class SameInput:
    """The input factor of one batch, for as many calls as read it; gone when the last of them has had it."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._made: dict[object, Matrix] = {}

    def add_to(self, total: Matrix, rows: Tensor, *, ones: bool, diagonal: bool) -> None:
        """The same as `add_gram`."""
        parts = pieces(total)
        key = tuple(part.shape for part in parts)  # of one input: they tell ones and diagonals apart
        self.readers -= 1
        if key not in self._made:
            if not self.readers:
                add_gram(total, rows, ones=ones, diagonal=diagonal)
                return
            self._made[key] = joined([torch.zeros_like(part) for part in parts])
            add_gram(self._made[key], rows, ones=ones, diagonal=diagonal)
        for part, made in zip(parts, pieces(self._made[key]), strict=True):
            part += made
        if not self.readers:
            self._made.clear()


def find_same_inputs(calls: Iterable[Call]) -> None:
    """Let the calls that read the same input know of one another."""
    readers: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        data = call.data
        if isinstance(call.layer, MatrixLayer) and data.numel() >= FEWEST_ROWS * data.shape[-1] > 0:
            readers[data.data_ptr(), data.shape, data.stride(), data.dtype].append(call)
    for some in readers.values():
        if len(some) > 1:
            shared = SameInput(len(some))
            for call in some:
                call.same_input = shared
