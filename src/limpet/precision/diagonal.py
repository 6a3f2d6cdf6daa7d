"""A number per weight: the diagonal of the Fisher (Kirkpatrick et al. 2017, elastic weight consolidation)."""

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
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Diagonal(Precision):
    """L = prior * I + diag(D), D in the shape of the block."""

    structure = "diagonal"
    shape: torch.Size
    prior: float
    values: WeightedSum

    @classmethod
    def start(cls, shape: torch.Size, prior: float, like: Tensor) -> Diagonal:
        """The prior alone."""
        return cls(shape, prior, WeightedSum.zero(shape, like))

    @property
    def _full(self) -> Tensor:
        return self.values.total + self.prior

    def add(self, term: Term, strength: float) -> Self:
        if not isinstance(term, DiagonalTerm):
            raise TypeError(f"a diagonal precision takes a DiagonalTerm, not {type(term).__name__}")
        diagonal = check_shape("the diagonal", term.diagonal, self.shape)
        return replace(self, values=self.values.add(diagonal, strength))

    def scale(self, factor: float) -> Self:
        return replace(self, prior=factor * self.prior, values=self.values.scale(factor))

    def fisher(self) -> Self:
        return replace(self, prior=0.0, values=self.values.unweighted())

    def apply(self, v: Tensor) -> Tensor:
        return self._full * v

    def proximal(self, v: Tensor, step: float) -> Tensor:
        return v / (1 + step * self._full)

    def spectrum(self) -> Spectrum:
        return Spectrum(self.values.plain, self.values.total, self.prior, lambda v: v, lambda v: v)

    def solve(self, v: Tensor) -> Tensor:
        return v * inverse_root(self._full).square()

    def trace(self) -> Tensor:
        return widened(self._full).sum()

    def log_determinant(self) -> Tensor:
        return widened(self._full).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return noise(self.shape, self.values.plain, generator) * inverse_root(self._full)

    def dense(self) -> Tensor:
        return torch.diag(self._full.flatten())

    def diagonals(self) -> tuple[Tensor, Tensor]:
        return self.values.plain, self.values.total

    def tensors(self) -> dict[str, Tensor]:
        return self.values.tensors("diagonal")

    def metadata(self) -> Metadata:
        return {"prior": self.prior, "strength": self.values.strength}

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        for name, tensor in tensors.items():
            check_shape(name, tensor, shape)
        return cls(
            shape,
            metadata_number(metadata, "prior"),
            WeightedSum.restore("diagonal", tensors, optional_metadata_number(metadata, "strength")),
        )
