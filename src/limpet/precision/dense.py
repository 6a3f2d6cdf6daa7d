"""Dense precision: the full Fisher of a block as one matrix, for small blocks and as a reference for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limpet.precision.base import (
    Metadata,
    Precision,
    check_shape,
    inverse_root,
    metadata_number,
    noise,
    optional_metadata_number,
)
from limpet.precision.linalg import symmetric_eigen, widened
from limpet.precision.spectrum import Spectrum
from limpet.precision.terms import DenseTerm, Term
from limpet.precision.validity import check_positive_semidefinite
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Dense(Precision):
    """Precision L = prior * I + sum of strength_t F_t with F_t (n, n) over W flattened row by row.

    Args:
        shape: Shape of the block.
        prior: Prior precision.
        matrix: Sums of the F_t, each of shape (n, n).
    """

    structure = "dense"
    shape: torch.Size
    prior: float
    matrix: WeightedSum

    @classmethod
    def start(cls, shape: torch.Size, prior: float, like: Tensor) -> Dense:
        """Create the precision of a block before the first task, which is the prior alone.

        Args:
            shape: Shape of the block.
            prior: Prior precision.
            like: Tensor whose dtype and device the precision gets.

        Returns:
            The precision.
        """
        n = shape.numel()
        return cls(shape, prior, WeightedSum.zero(torch.Size([n, n]), like))

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of L, including the prior, and its eigenvectors, in the stored dtype."""
        values, vectors = symmetric_eigen(self.matrix.total)
        like = self.matrix.plain
        return (values + self.prior).to(like.device, like.dtype), vectors.to(like.device, like.dtype)

    def _by_eigenvalue(self, v: Tensor, factor: Tensor) -> Tensor:
        """Multiply the coordinates of v in the eigenbasis by `factor`."""
        vectors = self._eigen[1]
        return (vectors @ (factor * (vectors.mT @ v.flatten()))).reshape(self.shape)

    def add(self, term: Term, strength: float) -> Self:
        """Return L + strength * F for a `DenseTerm`."""
        if not isinstance(term, DenseTerm):
            raise TypeError(f"a dense precision takes a DenseTerm, not {type(term).__name__}")
        return replace(self, matrix=self.matrix.add(term.matrix, strength))

    def scale(self, factor: float) -> Self:
        """Return factor * L, including the prior."""
        return replace(self, prior=factor * self.prior, matrix=self.matrix.scale(factor))

    def fisher(self) -> Self:
        """Return the sum of the F_t alone: no prior, and every strength 1."""
        return replace(self, prior=0.0, matrix=self.matrix.unweighted())

    def apply(self, v: Tensor) -> Tensor:
        """Return L v."""
        return (self.matrix.total @ v.flatten()).reshape(self.shape) + self.prior * v

    def proximal(self, v: Tensor, step: float) -> Tensor:
        """Return the proximal step (I + step L)^-1 v, from the eigendecomposition of L."""
        return self._by_eigenvalue(v, 1 / (1 + step * self._eigen[0]))

    def spectrum(self) -> Spectrum:
        """Return the eigenvalues of L, and the diagonal of the Fisher in the eigenbasis of L."""
        values, vectors = self._eigen
        plain = ((self.matrix.plain @ vectors) * vectors).sum(0)
        return Spectrum(
            plain,
            values - self.prior,
            self.prior,
            into=lambda v: v.flatten(-len(self.shape)) @ vectors,
            back=lambda v: (v @ vectors.mT).reshape(*v.shape[:-1], *self.shape),
        )

    def solve(self, v: Tensor) -> Tensor:
        """Return L^-1 v, from the eigendecomposition of L."""
        return self._by_eigenvalue(v, inverse_root(self._eigen[0]).square())

    def trace(self) -> Tensor:
        """Return the trace of L, in float64."""
        return widened(self.matrix.total).trace() + self.prior * self.shape.numel()

    def log_determinant(self) -> Tensor:
        """Return log det L, in float64."""
        return widened(self._eigen[0]).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one sample from N(0, L^-1)."""
        drawn = noise(self.shape, self.matrix.plain, generator).flatten()
        return (self._eigen[1] @ (inverse_root(self._eigen[0]) * drawn)).reshape(self.shape)

    def dense(self) -> Tensor:
        """Return L as a matrix over W flattened row by row."""
        n = self.shape.numel()
        return self.matrix.total + self.prior * torch.eye(
            n, dtype=self.matrix.plain.dtype, device=self.matrix.plain.device
        )

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""
        plain, total = self.matrix.plain.diagonal(), self.matrix.total.diagonal()
        return plain.reshape(self.shape), total.reshape(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return self.matrix.tensors("matrix")

    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        return {"prior": self.prior, "strength": self.matrix.strength}

    def check(self) -> None:
        """Check that the matrix is symmetric and positive semi-definite."""
        for name, tensor in self.tensors().items():
            check_positive_semidefinite(name, tensor)

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`."""
        n = shape.numel()
        for name, tensor in tensors.items():
            check_shape(name, tensor, (n, n))
        matrix = WeightedSum.restore("matrix", tensors, optional_metadata_number(metadata, "strength"))
        return cls(shape, metadata_number(metadata, "prior"), matrix)
