"""Rotation of a block, or of its low-rank factors, into a pair of row and column bases and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from limpet.precision.block_diagonal import Orthogonal
from limpet.precision.reflections import Reflections


@dataclass(frozen=True)
class Rotation:
    """Row and column bases U_H and U_Q of a block, with the maps into them and back.

    Args:
        rows: U_H. None is the identity.
        columns: U_Q. None is the identity.
    """

    rows: Orthogonal | None = None
    columns: Orthogonal | None = None

    def to(self, like: Tensor) -> Rotation:
        """Return the same rotation in the dtype and on the device of `like`."""
        rows, columns = (
            None if side is None else side.to(like.device, like.dtype) for side in (self.rows, self.columns)
        )
        return Rotation(rows, columns)

    def into(self, block: Tensor) -> Tensor:
        """Return U_H^T block U_Q."""
        block = block if self.rows is None else self.rows.mT @ block
        return block if self.columns is None else block @ self.columns

    def back(self, c: Tensor) -> Tensor:
        """Return U_H c U_Q^T, the inverse of `into`."""
        c = self.rows_back(c)
        return c if self.columns is None else c @ self.columns.mT

    def rows_into(self, factor: Tensor) -> Tensor:
        """Return U_H^T B for a left low-rank factor B (rows, rank)."""
        # (B^T U)^T instead of U^T B as in `into`: nearly twice as fast for tall, narrow B.
        return factor if self.rows is None else (factor.mT @ self.rows).mT

    def rows_back(self, factor: Tensor) -> Tensor:
        """Return U_H B for a left low-rank factor B (rows, rank)."""
        return factor if self.rows is None else self.rows @ factor

    def weighted(self, values: Tensor, block: Tensor) -> Tensor:
        """Return U_H ((U_H^T block U_Q) * values) U_Q^T.

        Args:
            values: Factors in the shape of the block; equal in all columns of the complement of a truncated U_Q.
            block: The block.
        """
        if not isinstance(self.columns, Reflections) or block.dim() > 2:
            return self.back(values * self.into(block))
        rows = block if self.rows is None else self.rows.mT @ block
        return self.rows_back(self.columns.weighted(values, rows))

    def rows_weighted(self, values: Tensor, factor: Tensor) -> Tensor:
        """Return U_H diag(values) U_H^T B for a left low-rank factor B (rows, rank)."""
        if isinstance(self.rows, Reflections):
            return self.rows.weighted(values, factor.mT).mT
        return self.rows_back(values.unsqueeze(-1) * self.rows_into(factor))

    def columns_weighted(self, values: Tensor, factor: Tensor) -> Tensor:
        """Return A U_Q diag(values) U_Q^T, in the columns of A, for a right low-rank factor A (rank, width)."""
        width = factor.shape[1]
        if isinstance(self.columns, Reflections):
            return self.columns.weighted(values, F.pad(factor, (0, len(values) - width)))[:, :width]
        rotated = self.columns_into(factor)
        return self.columns_back(values[: rotated.shape[1]] * rotated, width)

    def columns_into(self, factor: Tensor) -> Tensor:
        """Return A U_Q for a right low-rank factor A (rank, width).

        The block may have more columns than A (a bias); A is zero in them.
        """
        width = factor.shape[1]
        if self.columns is None:
            return factor
        if isinstance(self.columns, Tensor):
            return factor @ self.columns[:width]
        return F.pad(factor, (0, sum(self.columns.sizes) - width)) @ self.columns

    def columns_back(self, factor: Tensor, width: int) -> Tensor:
        """Return the first `width` columns of A U_Q^T.

        Args:
            factor: Right low-rank factor A (rank, columns), in the basis.
            width: Number of columns to return.

        Returns:
            The factor (rank, width).
        """
        if isinstance(self.columns, Tensor):
            return factor @ self.columns[:width].mT
        return (factor if self.columns is None else factor @ self.columns.mT)[:, :width]
