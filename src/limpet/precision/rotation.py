"""The two bases of a block, and the ways into them and back, for whole blocks and for thin factors of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from limpet.precision.block_diagonal import Matrix


@dataclass(frozen=True)
class Rotation:
    """U_H and U_Q of a block (None: the identity), and the ways into them and back."""

    rows: Matrix | None = None
    columns: Matrix | None = None

    def to(self, like: Tensor) -> Rotation:
        """The same in the dtype and on the device of a tensor."""
        rows, columns = (
            None if side is None else side.to(like.device, like.dtype) for side in (self.rows, self.columns)
        )
        return Rotation(rows, columns)

    def into(self, block: Tensor) -> Tensor:
        """U_H^T block U_Q."""
        block = block if self.rows is None else self.rows.mT @ block
        return block if self.columns is None else block @ self.columns

    def back(self, c: Tensor) -> Tensor:
        """The inverse of `into`."""
        c = self.rows_back(c)
        return c if self.columns is None else c @ self.columns.mT

    def rows_into(self, lora_penalties: Tensor) -> Tensor:
        """U_H^T thin."""
        # (v^T U)^T rather than U^T v, as `into` has it: for thin v nearly twice as fast
        return lora_penalties if self.rows is None else (lora_penalties.mT @ self.rows).mT

    def rows_back(self, lora_penalties: Tensor) -> Tensor:
        """U_H thin."""
        return lora_penalties if self.rows is None else self.rows @ lora_penalties

    def columns_into(self, lora_penalties: Tensor) -> Tensor:
        """thin U_Q; the columns that the block has beyond those of `thin` are zero there."""
        width = lora_penalties.shape[1]
        if self.columns is None:
            return lora_penalties
        if isinstance(self.columns, Tensor):
            return lora_penalties @ self.columns[:width]
        return F.pad(lora_penalties, (0, sum(self.columns.sizes) - width)) @ self.columns

    def columns_back(self, lora_penalties: Tensor, width: int) -> Tensor:
        """The first columns of thin U_Q^T."""
        if isinstance(self.columns, Tensor):
            return lora_penalties @ self.columns[:width].mT
        return (lora_penalties if self.columns is None else lora_penalties @ self.columns.mT)[:, :width]
