"""Diagonal precision: the diagonal of the Fisher (Kirkpatrick et al. 2017, elastic weight consolidation)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from limpet.precision.linalg import widened
from limpet.precision.spectrum import Spectrum
from limpet.precision.terms import DiagonalTerm, Term
from limpet.precision.validity import check_non_negative
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Diagonal(Precision):
    """Precision L = prior * I + diag(D) with D in the shape of the block.

    Args:
        shape: Shape of the block.
        prior: Prior precision.
        values: Sums of the diagonals of the F_t, in the shape of the block.
    """

    structure = "diagonal"
    shape: torch.Size
    prior: float
    values: WeightedSum

    @classmethod
    def start(cls, shape: torch.Size, prior: float, like: Tensor) -> Diagonal:
        """Create the precision of a block before the first task, which is the prior alone.

        Args:
            shape: Shape of the block.
            prior: Prior precision.
            like: Tensor whose dtype and device the precision gets.

        Returns:
            The precision.
        """
        return cls(shape, prior, WeightedSum.zero(shape, like))

    @property
    def _full(self) -> Tensor:
        """The diagonal of L, including the prior."""
        return self.values.total + self.prior

    def add(self, term: Term, strength: float) -> Self:
        """Return L + strength * F for a `DiagonalTerm`."""
        if not isinstance(term, DiagonalTerm):
            raise TypeError(f"a diagonal precision takes a DiagonalTerm, not {type(term).__name__}")
        diagonal = check_shape("the diagonal", term.diagonal, self.shape)
        return replace(self, values=self.values.add(diagonal, strength))

    def scale(self, factor: float) -> Self:
        """Return factor * L, including the prior."""
        return replace(self, prior=factor * self.prior, values=self.values.scale(factor))

    def fisher(self) -> Self:
        """Return the sum of the F_t alone: no prior, and every strength 1."""
        return replace(self, prior=0.0, values=self.values.unweighted())

    def apply(self, v: Tensor) -> Tensor:
        """Return L v."""
        return self._full * v

    def proximal(self, v: Tensor, step: float) -> Tensor:
        """Return the proximal step (I + step L)^-1 v."""
        return v / (1 + step * self._full)

    def spectrum(self) -> Spectrum:
        """Return the eigenvalues of L and of its Fisher, which are their diagonals."""
        return Spectrum(self.values.plain, self.values.total, self.prior, lambda v: v, lambda v: v)

    def solve(self, v: Tensor) -> Tensor:
        """Return L^-1 v."""
        return v * inverse_root(self._full).square()

    def trace(self) -> Tensor:
        """Return the trace of L, in float64."""
        return widened(self._full).sum()

    def eigenvalue_bound(self) -> float:
        """Return the largest eigenvalue of L."""
        return self.values.largest() + self.prior

    def log_determinant(self) -> Tensor:
        """Return log det L, in float64."""
        return widened(self._full).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one sample from N(0, L^-1)."""
        return noise(self.shape, self.values.plain, generator) * inverse_root(self._full)

    def dense(self) -> Tensor:
        """Return L as a matrix over W flattened row by row."""
        return torch.diag(self._full.flatten())

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""
        return self.values.plain, self.values.total

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return self.values.tensors("diagonal")

    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        return {"prior": self.prior, "strength": self.values.strength}

    def check(self) -> None:
        """Check that the diagonal is not negative."""
        for name, tensor in self.tensors().items():
            check_non_negative(name, tensor)

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`."""
        for name, tensor in tensors.items():
            check_shape(name, tensor, shape)
        return cls(
            shape,
            metadata_number(metadata, "prior"),
            WeightedSum.restore("diagonal", tensors, optional_metadata_number(metadata, "strength")),
        )
