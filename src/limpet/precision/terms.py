"""What one task's Fisher of one block looks like, as the curvature pass hands it over.

A block is a weight matrix W of shape (..., out, in). Leading dimensions are sub-blocks taken as independent
(the groups of a grouped convolution).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KroneckerTerm:
    """Q (x) H with Q = `inputs` and H = `outputs`, each a matrix (..., n, n) or a diagonal (..., n)."""

    inputs: Tensor
    outputs: Tensor
    inputs_diagonal: bool = False
    outputs_diagonal: bool = False

    def apply(self, v: Tensor) -> Tensor:
        """H v Q: this Fisher times v, in the shape of W."""
        left = self.outputs.unsqueeze(-1) * v if self.outputs_diagonal else self.outputs @ v
        return left * self.inputs.unsqueeze(-2) if self.inputs_diagonal else left @ self.inputs

    def scaled(self, factor: float) -> KroneckerTerm:
        """`factor` times this Fisher."""
        return KroneckerTerm(self.inputs, self.outputs * factor, self.inputs_diagonal, self.outputs_diagonal)

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return bool(torch.isfinite(self.inputs).all() & torch.isfinite(self.outputs).all())


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

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return bool(torch.isfinite(self.diagonal).all())


@dataclass(frozen=True)
class DenseTerm:
    """The whole Fisher (n, n) of W flattened row by row, sub-blocks and all."""

    matrix: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """This Fisher times v, in the shape of W."""
        return (self.matrix @ v.flatten()).reshape(v.shape)

    def scaled(self, factor: float) -> DenseTerm:
        """`factor` times this Fisher."""
        return DenseTerm(self.matrix * factor)

    def is_finite(self) -> bool:
        """Whether no entry is inf or nan."""
        return bool(torch.isfinite(self.matrix).all())


Term = KroneckerTerm | DiagonalTerm | DenseTerm
