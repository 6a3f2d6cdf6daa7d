"""The verbs that every structure of a precision has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from limpet.errors import LimpetError, finite_number
from limpet.precision.rotation import Rotation
from limpet.precision.spectrum import Spectrum
from limpet.precision.terms import Term

if TYPE_CHECKING:
    from typing_extensions import Self

Metadata = dict[str, Any]
"""The numbers of a precision that are not tensors; plain JSON."""


class Precision(ABC):
    """The precision L = prior * I + sum of strength_t F_t of one block, a matrix W of shape (..., out, in).

    These verbs are what protection, forecasts, predictions and marginal likelihoods are made of.
    A precision never changes: `add`, `scale` and `to` give a new one. `v` is everywhere a tensor in the shape
    of the block, and stands for the vector of its entries.
    """

    structure: ClassVar[str]
    shape: torch.Size
    prior: float

    @abstractmethod
    def add(self, term: Term, strength: float) -> Self:
        """L + strength * F."""

    @abstractmethod
    def scale(self, factor: float) -> Self:
        """factor * L, the prior included."""

    @abstractmethod
    def fisher(self) -> Self:
        """The sum of the F_t alone: no prior, every strength 1."""

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """L v."""

    def applier(self) -> Callable[[Tensor], Tensor]:
        """`apply` for many uses: may be faster, and take memory of its own as long as it is kept."""
        return self.apply

    def sides(self) -> Rotation:
        """Bases of the rows and of the columns between which `apply_in_sides` works."""
        return Rotation()

    def apply_in_sides(self, v: Tensor) -> Tensor:
        """L v where v, and what comes of it, are U_rows^T (.) U_columns."""
        return self.apply(v)

    def quadratic(self, v: Tensor) -> Tensor:
        """v^T L v, differentiable."""
        return (v * self.apply(v)).sum()

    @abstractmethod
    def proximal(self, v: Tensor, step: float) -> Tensor:
        """(I + step L)^-1 v, the minimiser of 1/(2 step) ||w - v||^2 + 1/2 w^T L w."""

    @abstractmethod
    def spectrum(self) -> Spectrum:
        """L and its Fisher in one basis; where they share none, the Fisher's diagonal in that of L."""

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """L^-1 v."""

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace of L, in float64."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """log det L, in float64."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw from N(0, L^-1)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """L as a matrix, W flattened row by row. For small blocks and tests."""

    @abstractmethod
    def diagonals(self) -> tuple[Tensor, Tensor]:
        """The diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to keep, by name."""

    @abstractmethod
    def metadata(self) -> Metadata:
        """The numbers to keep beside the tensors."""

    @classmethod
    @abstractmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """The inverse of `tensors` and `facts`; a ValueError says what does not fit."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same precision on another device or in another dtype."""
        moved = {name: tensor.to(device, dtype) for name, tensor in self.tensors().items()}
        return self.restore(self.shape, moved, self.metadata())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors kept."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())


def noise(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in the dtype and on the device of `like`."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)


def inverse_root(eigenvalues: Tensor) -> Tensor:
    """1 / sqrt(eigenvalues), refused where a direction has no precision at all."""
    if not bool((eigenvalues > 0).all()):
        raise LimpetError("the precision is singular, so it has no inverse: give prior_precision > 0")
    return eigenvalues.rsqrt()


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor, if it has that shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    return tensor


def metadata_number(metadata: Metadata, name: str) -> float:
    """The number of that name; a ValueError where it is missing or not a finite number >= 0."""
    return finite_number(name, metadata.get(name))


def optional_metadata_number(metadata: Metadata, name: str) -> float | None:
    """The number of that name, or None."""
    return None if metadata.get(name) is None else metadata_number(metadata, name)
