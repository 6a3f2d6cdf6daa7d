"""A block that trains through low-rank adapters: W = base + sum of scaling B A.

Its displacement in the block's own bases is

    c = U_H^T (base - mean) U_Q + sum of scaling (U_H^T B) (A U_Q),

where the first part does not change while the base is frozen (and is zero where the memory was made on it), and the
factors of the second are thin. With G = L c, the gradients of 1/2 c^T L c are

    in B: scaling U_H (G (A U_Q)^T),    in A: scaling ((U_H^T B)^T G) U_Q^T.

For a weight of out x in and rank r that is a few times r (out^2 + in^2 + out in) products, never out in (out + in).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.curvature import DIRECT, LowRank
from limpet.precision import Kronecker

if TYPE_CHECKING:
    from limpet.posterior import Held


class Thin:
    """The displacement, penalty and gradients of one block with adapters."""

    def __init__(self, held: Held, parameters: Sequence[nn.Parameter], adapters: Sequence[LowRank]) -> None:
        self.held, self.parameters, self.adapters = held, parameters, adapters
        self.rows, self.columns = (None, None) if held.block.kind == DIRECT else held.precision.sides()
        self._known: tuple[Any, Tensor | None] = (None, None)  # the weights as they were, and base - mean
        slope = held.slope
        self.slope = None if slope is None else self._into(slope)

    @property
    def rotated(self) -> bool:
        """Whether the coordinates are those of the precision's spectrum."""
        return self.held.block.kind != DIRECT and isinstance(self.held.precision, Kronecker)

    def fits(self, held: Held, parameters: Sequence[nn.Parameter], adapters: Sequence[LowRank]) -> bool:
        """Whether this is still how the block is: its memory, its weights and its adapters."""
        ours, theirs = (
            [(id(one.a), id(one.b), one.scaling, one.transposed) for one in some] for some in (self.adapters, adapters)
        )
        same = all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        return self.held is held and same and ours == theirs

    def coordinates(self) -> Tensor:
        """w - mean in the block's bases, differentiable in the adapters."""
        start = self._offset()
        for adapter in self.adapters:
            left, right = self._factors(adapter)
            added = adapter.scaling * (left @ right)
            added = added.reshape(self.held.block.shape)
            start = added if start is None else start + added
        return torch.zeros_like(self.held.mean) if start is None else start

    def value(self) -> Tensor:
        """The penalty of the block, differentiable in the adapters."""
        c = self.coordinates()
        value = (c * self.held.precision.apply_in_sides(c)).sum() / 2
        return value if self.slope is None else value + (self.slope * c).sum()

    def rise(self) -> float:
        """1/2 d^T F d."""
        with torch.no_grad():
            c = self.coordinates()
            return float((c * self.held.precision.fisher().apply_in_sides(c)).sum()) / 2

    def pull(self, c: Tensor) -> Tensor:
        """The gradient of the penalty in the coordinates."""
        pulled = self.held.precision.apply_in_sides(c)
        return pulled if self.slope is None else pulled + self.slope

    def gradients(self, pulled: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """What a gradient in the coordinates is in the adapters' parameters."""
        for adapter in self.adapters:
            left, right = self._factors(adapter)
            matrix = pulled.reshape(left.shape[0], right.shape[1])
            of_left = self._rows_back(adapter.scaling * (matrix @ right.mT))
            of_right = self._columns_back(adapter.scaling * (left.mT @ matrix), adapter.right.shape[1])
            yield from adapter.gradients(of_left, of_right)

    def back(self, c: Tensor) -> Tensor:
        """From the block's bases to the block."""
        c = self._rows_back(c)
        return c if self.columns is None else c @ self.columns.mT

    def _into(self, block: Tensor) -> Tensor:
        block = block if self.rows is None else self.rows.mT @ block
        return block if self.columns is None else block @ self.columns

    def _rows_back(self, thin: Tensor) -> Tensor:
        return thin if self.rows is None else self.rows @ thin

    def _columns_back(self, thin: Tensor, width: int) -> Tensor:
        return thin[:, :width] if self.columns is None else thin @ self.columns[:width].mT

    def _factors(self, adapter: LowRank) -> tuple[Tensor, Tensor]:
        """U_H^T left and right U_Q; where the block has a bias, no adapter reaches its column."""
        like = self.held.mean
        left, right = (factor.to(like.device, like.dtype) for factor in (adapter.left, adapter.right))
        if self.rows is not None:
            left = self.rows.mT @ left
        if self.columns is not None:
            return left, right @ self.columns[: right.shape[1]]
        bias = 0 if self.held.block.kind == DIRECT else self.held.block.shape[-1] - right.shape[1]
        return left, F.pad(right, (0, bias)) if bias else right

    @torch.no_grad()
    def _offset(self) -> Tensor | None:
        """base - mean in the block's bases; None where it is zero. Made anew when a base weight has changed."""
        state = [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]
        if self._known[0] != state:
            weights = dict(zip(self.held.block.parameters, self.parameters, strict=True))
            offset = self.held.displacement(weights)
            self._known = state, self._into(offset) if bool(offset.any()) else None
        return self._known[1]


@torch.no_grad()
def scale_down(blocks: Sequence[Thin], most: float) -> None:
    """Make what adapters add smaller, all by the same factor, until 1/2 d^T F d of these blocks is `most`.

    It goes with the square of the factor where the adapters are all of the displacement; elsewhere with less.
    """
    for _ in range(20):
        rise = sum(block.rise() for block in blocks)
        if rise <= most * (1 + 1e-6):
            return
        for block in blocks:
            for adapter in block.adapters:
                if adapter.b.requires_grad:
                    adapter.b.mul_(math.sqrt(most / rise))
