"""The two bases of a block, and the ways into them and back, for whole blocks and for thin factors of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from limpet.precision.block_diagonal import Matrix


@dataclass(frozen=True)
class Sides:
    """U_H and U_Q of a block (None: the identity), and the ways into them and back."""

    rows: Matrix | None = None
    columns: Matrix | None = None

    def to(self, like: Tensor) -> Sides:
        """The same in the dtype and on the device of a tensor."""
        rows, columns = (
            None if side is None else side.to(like.device, like.dtype) for side in (self.rows, self.columns)
        )
        return Sides(rows, columns)

    def into(self, block: Tensor) -> Tensor:
        """U_H^T block U_Q."""
        block = block if self.rows is None else self.rows.mT @ block
        return block if self.columns is None else block @ self.columns

    def back(self, c: Tensor) -> Tensor:
        """The inverse of `into`."""
        c = self.rows_back(c)
        return c if self.columns is None else c @ self.columns.mT

    def rows_into(self, thin: Tensor) -> Tensor:
        """U_H^T thin."""
        # (v^T U)^T rather than U^T v, as `into` has it: for thin v nearly twice as fast
        return thin if self.rows is None else (thin.mT @ self.rows).mT

    def rows_back(self, thin: Tensor) -> Tensor:
        """U_H thin."""
        return thin if self.rows is None else self.rows @ thin

    def columns_into(self, thin: Tensor) -> Tensor:
        """thin U_Q; the columns that the block has beyond those of `thin` are zero there."""
        width = thin.shape[1]
        if self.columns is None:
            return thin
        if isinstance(self.columns, Tensor):
            return thin @ self.columns[:width]
        return F.pad(thin, (0, sum(self.columns.sizes) - width)) @ self.columns

    def columns_back(self, thin: Tensor, width: int) -> Tensor:
        """The first columns of thin U_Q^T."""
        if isinstance(self.columns, Tensor):
            return thin @ self.columns[:width].mT
        return (thin if self.columns is None else thin @ self.columns.mT)[:, :width]
