"""What one task's Fisher of one block looks like, as the curvature pass hands it over.

A block is a weight matrix W of shape (..., out, in). Leading dimensions are sub-blocks taken as independent
(the groups of a grouped convolution).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.block_diagonal import Matrix, diagonal, pieces


@dataclass(frozen=True)
class KroneckerTerm:
    """Q (x) H with Q = `inputs` and H = `outputs`: matrices (..., n, n), whole or in pieces, or diagonals (..., n)."""

    inputs: Matrix
    outputs: Matrix
    inputs_diagonal: bool = False
    outputs_diagonal: bool = False

    def apply(self, v: Tensor) -> Tensor:
        """H v Q: this Fisher times v, in the shape of W."""
        h, q = self.outputs, self.inputs
        v = v.to(pieces(h)[0].dtype)
        left = h.unsqueeze(-1) * v if self.outputs_diagonal and isinstance(h, Tensor) else h @ v
        return left * q.unsqueeze(-2) if self.inputs_diagonal and isinstance(q, Tensor) else left @ q

    def factors(self) -> tuple[Tensor, Tensor]:
        """Q and H written out as matrices."""

        def written_out(factor: Matrix, is_diagonal: bool) -> Tensor:
            if not isinstance(factor, Tensor):
                return factor.dense()
            return torch.diag_embed(factor) if is_diagonal else factor

        return written_out(self.inputs, self.inputs_diagonal), written_out(self.outputs, self.outputs_diagonal)

    def scaled(self, factor: float) -> KroneckerTerm:
        """`factor` times this Fisher."""
        return KroneckerTerm(self.inputs, self.outputs * factor, self.inputs_diagonal, self.outputs_diagonal)

    def is_positive(self) -> bool:
        """Whether it is not all zero."""
        return all(
            bool((diagonal(factor, is_diagonal) > 0).any())
            for factor, is_diagonal in ((self.inputs, self.inputs_diagonal), (self.outputs, self.outputs_diagonal))
        )

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return all(bool(torch.isfinite(piece).all()) for piece in (*pieces(self.inputs), *pieces(self.outputs)))


@dataclass(frozen=True)
class DiagonalTerm:
    """The diagonal of the Fisher, in the shape of W."""

    diagonal: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """This Fisher times v, in the shape of W."""
        return self.diagonal * v

    def scaled(self, factor: float) -> DiagonalTerm:
        """`factor` times this Fisher."""
        return DiagonalTerm(self.diagonal * factor)

    def is_positive(self) -> bool:
        """Whether it is not all zero."""
        return bool((self.diagonal > 0).any())

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return bool(torch.isfinite(self.diagonal).all())


@dataclass(frozen=True)
class DenseTerm:
    """The whole Fisher (n, n) of W flattened row by row, sub-blocks and all."""

    matrix: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """This Fisher times v, in the shape of W."""
        return (self.matrix @ v.flatten().to(self.matrix.dtype)).reshape(v.shape)

    def scaled(self, factor: float) -> DenseTerm:
        """`factor` times this Fisher."""
        return DenseTerm(self.matrix * factor)

    def is_positive(self) -> bool:
        """Whether it is not all zero."""
        return bool((self.matrix.diagonal() > 0).any())

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return bool(torch.isfinite(self.matrix).all())


Term = KroneckerTerm | DiagonalTerm | DenseTerm
