"""Share the input factor among layers that read the same tensor: it is computed once per batch and added to each.

In a transformer the query, key and value projections read one tensor, and the gate and up projections another. Layer
names play no role: two calls have the same input if their data have the same memory, shape, strides and dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from limpet.curvature.gram import add_grams
from limpet.layers import Call, MatrixLayer
from limpet.precision import Matrix
from limpet.precision.block_diagonal import joined, pieces
from limpet.precision.sketch import Sketch

FEWEST_ROWS = 32
"""Number of rows, per unit of width, from which adding a cached matrix is faster than computing it again."""


class SameInput:
    """Input factor of one batch, cached until the last call that reads the input has used it.

    Args:
        readers: Number of calls that read the input.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._made: dict[object, Matrix | Sketch] = {}

    def add_to(self, total: Matrix | Sketch, parts: Iterable[Tensor], *, ones: bool, diagonal: bool) -> None:
        """Add rows^T rows to `total` like `add_grams`, using the cached matrix if there is one.

        Args:
            total: The matrix to add to.
            parts: The rows of the input, the same in every call.
            ones: Whether to append a column of ones to `rows`.
            diagonal: Whether `total` is a diagonal.
        """
        totals = _tensors(total)
        key = tuple(each.shape for each in totals)  # for a given input, the shapes determine `ones` and `diagonal`
        self.readers -= 1
        if key not in self._made:
            if not self.readers:
                add_grams(total, parts, ones=ones, diagonal=diagonal)
                return
            zeros = [torch.zeros_like(each) for each in totals]
            self._made[key] = Sketch(*zeros) if isinstance(total, Sketch) else joined(zeros)
            add_grams(self._made[key], parts, ones=ones, diagonal=diagonal)
        for each, made in zip(totals, _tensors(self._made[key]), strict=True):
            each += made
        if not self.readers:
            self._made.clear()


def _tensors(total: Matrix | Sketch) -> tuple[Tensor, ...]:
    """Return the tensors of a sum."""
    return (total.product, total.diagonal) if isinstance(total, Sketch) else pieces(total)


def find_same_inputs(calls: Iterable[Call]) -> None:
    """Find the calls that read the same input, and let them share one `SameInput`."""
    readers: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        if isinstance(call.layer, MatrixLayer) and call.shape.numel() >= FEWEST_ROWS * call.shape[-1] > 0:
            readers[call.layer.input_key(call)].append(call)
    for some in readers.values():
        if len(some) > 1:
            shared = SameInput(len(some))
            for call in some:
                call.same_input = shared
