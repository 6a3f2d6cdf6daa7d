"""The Fisher of one block on one task, as computed by the curvature pass.

A block is a weight matrix W of shape (..., out, in). Leading dimensions are sub-blocks that are treated as independent
(the groups of a grouped convolution).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.block_diagonal import Side, diagonal, pieces
from limpet.precision.linalg import all_finite
from limpet.precision.spiked import Spiked


@dataclass(frozen=True)
class KroneckerTerm:
    """K-FAC approximation F = Q (x) H of the Fisher.

    Each factor is a matrix (..., n, n): full, block-diagonal, or of low rank plus a multiple of the identity; or it is
    a diagonal (..., n).

    Args:
        inputs: Input factor Q.
        outputs: Output factor H.
        inputs_diagonal: Whether `inputs` is a diagonal.
        outputs_diagonal: Whether `outputs` is a diagonal.
    """

    inputs: Side
    outputs: Side
    inputs_diagonal: bool = False
    outputs_diagonal: bool = False

    def apply(self, v: Tensor) -> Tensor:
        """Return F v = H v Q, in the shape of W."""
        h, q = self.outputs, self.inputs
        v = v.to(h.columns.dtype if isinstance(h, Spiked) else pieces(h)[0].dtype)
        left = h.unsqueeze(-1) * v if self.outputs_diagonal and isinstance(h, Tensor) else h @ v
        return left * q.unsqueeze(-2) if self.inputs_diagonal and isinstance(q, Tensor) else left @ q

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return Q and H as full matrices."""

        def written_out(factor: Side, is_diagonal: bool) -> Tensor:
            if not isinstance(factor, Tensor):
                return factor.dense()
            return torch.diag_embed(factor) if is_diagonal else factor

        return written_out(self.inputs, self.inputs_diagonal), written_out(self.outputs, self.outputs_diagonal)

    def scaled(self, factor: float) -> KroneckerTerm:
        """Return factor * F."""
        return KroneckerTerm(self.inputs, self.outputs * factor, self.inputs_diagonal, self.outputs_diagonal)

    def is_positive(self) -> bool:
        """Return whether F is not all zero."""
        return all(
            bool((diagonal(factor, is_diagonal) > 0).any())
            for factor, is_diagonal in ((self.inputs, self.inputs_diagonal), (self.outputs, self.outputs_diagonal))
        )

    def is_finite(self) -> bool:
        """Return whether all entries are finite."""
        return all(
            factor.is_finite() if isinstance(factor, Spiked) else all(map(all_finite, pieces(factor)))
            for factor in (self.inputs, self.outputs)
        )


@dataclass(frozen=True)
class DiagonalTerm:
    """Diagonal of the Fisher.

    Args:
        diagonal: The diagonal, in the shape of W.
    """

    diagonal: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """Return F v, in the shape of W."""
        return self.diagonal * v

    def scaled(self, factor: float) -> DiagonalTerm:
        """Return factor * F."""
        return DiagonalTerm(self.diagonal * factor)

    def is_positive(self) -> bool:
        """Return whether F is not all zero."""
        return bool((self.diagonal > 0).any())

    def is_finite(self) -> bool:
        """Return whether all entries are finite."""
        return all_finite(self.diagonal)


@dataclass(frozen=True)
class DenseTerm:
    """Full Fisher of W flattened row by row, across sub-blocks.

    Args:
        matrix: The Fisher (n, n).
    """

    matrix: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """Return F v, in the shape of W."""
        return (self.matrix @ v.flatten().to(self.matrix.dtype)).reshape(v.shape)

    def scaled(self, factor: float) -> DenseTerm:
        """Return factor * F."""
        return DenseTerm(self.matrix * factor)

    def is_positive(self) -> bool:
        """Return whether F is not all zero."""
        return bool((self.matrix.diagonal() > 0).any())

    def is_finite(self) -> bool:
        """Return whether all entries are finite."""
        return all_finite(self.matrix)


Term = KroneckerTerm | DiagonalTerm | DenseTerm
