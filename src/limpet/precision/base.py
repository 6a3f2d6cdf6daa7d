"""The interface that every precision structure implements."""

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
"""The numbers of a precision that are not tensors, as plain JSON values."""


class Precision(ABC):
    """Precision L = prior * I + sum of strength_t F_t of one block, a weight matrix W of shape (..., out, in).

    Protection, forecasts, predictions and the log marginal likelihood are built from these methods. A precision is
    immutable: `add`, `scale` and `to` return a new one. Throughout, `v` is a tensor in the shape of the block and
    stands for the vector of its entries.

    Attributes:
        structure: Name of the structure, the value of `structure=` that selects it.
        shape: Shape of the block.
        prior: Prior precision, the multiple of the identity in L.
    """

    structure: ClassVar[str]
    shape: torch.Size
    prior: float

    @abstractmethod
    def add(self, term: Term, strength: float) -> Self:
        """Return L + strength * F.

        Args:
            term: Fisher F of one task, in the form that belongs to this structure.
            strength: Multiplier of F.

        Returns:
            A new precision that includes the task.

        Raises:
            TypeError: If the term belongs to another structure.
        """

    @abstractmethod
    def scale(self, factor: float) -> Self:
        """Return factor * L, including the prior.

        The F_t themselves are scaled; the strengths stay as they are.

        Args:
            factor: Multiplier of L.

        Returns:
            A new precision.
        """

    @abstractmethod
    def fisher(self) -> Self:
        """Return the sum of the F_t alone: no prior, and every strength 1."""

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """Return L v.

        Args:
            v: Tensor in the shape of the block.

        Returns:
            The product, in the shape of the block.
        """

    def applier(self) -> Callable[[Tensor], Tensor]:
        """Return a version of `apply` for repeated use, which may be faster but hold extra memory while it is alive."""
        return self.apply

    def sides(self) -> Rotation:
        """Return the row and column bases in which `apply_in_sides` works."""
        return Rotation()

    def apply_in_sides(self, v: Tensor) -> Tensor:
        """Return L v with both v and the result given in the bases of `sides`, as U_rows^T (.) U_columns.

        Args:
            v: Rotated tensor, in the shape of the block.

        Returns:
            The rotated product.
        """
        return self.apply(v)

    def quadratic(self, v: Tensor) -> Tensor:
        """Return v^T L v, differentiable in v.

        Args:
            v: Tensor in the shape of the block.

        Returns:
            A scalar tensor.
        """
        return (v * self.apply(v)).sum()

    @abstractmethod
    def proximal(self, v: Tensor, step: float) -> Tensor:
        """Return the proximal step (I + step L)^-1 v, the minimiser of 1/(2 step) ||w - v||^2 + 1/2 w^T L w.

        Args:
            v: Tensor in the shape of the block.
            step: Step size.

        Returns:
            The minimiser w, in the shape of the block.
        """

    @abstractmethod
    def spectrum(self) -> Spectrum:
        """Return the eigenvalues of L and of its Fisher in one basis.

        Where the two share no eigenbasis, the Fisher is represented by its diagonal in the eigenbasis of L.
        """

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """Return L^-1 v.

        Args:
            v: Tensor in the shape of the block.

        Returns:
            The solution, in the shape of the block.

        Raises:
            LimpetError: If L is singular.
        """

    @abstractmethod
    def trace(self) -> Tensor:
        """Return the trace of L, in float64."""

    def eigenvalue_bound(self) -> float:
        """Return an upper bound on the largest eigenvalue of L: its trace, if the structure has no better one."""
        return float(self.trace())

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """Return log det L, in float64."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one sample from N(0, L^-1).

        Args:
            generator: Random number generator. Defaults to the global one.

        Returns:
            The sample, in the shape of the block.

        Raises:
            LimpetError: If L is singular.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """Return L as a matrix over W flattened row by row. For small blocks and tests."""

    @abstractmethod
    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""

    @abstractmethod
    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors, as plain JSON values."""

    @classmethod
    @abstractmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`.

        Args:
            shape: Shape of the block.
            tensors: Tensors by name, as returned by `tensors`.
            metadata: Numbers by name, as returned by `metadata`.

        Returns:
            The precision.

        Raises:
            ValueError: If a tensor or number does not fit the block.
        """

    @abstractmethod
    def check(self) -> None:
        """Check what holds for every precision that was computed; for precisions that come from a file.

        Raises:
            ValueError: If L is not symmetric and positive semi-definite, or a basis is not orthonormal.
        """

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same precision on another device or in another dtype.

        Args:
            device: Target device.
            dtype: Target dtype.

        Returns:
            A new precision.
        """
        moved = {name: tensor.to(device, dtype) for name, tensor in self.tensors().items()}
        return self.restore(self.shape, moved, self.metadata())

    @property
    def nbytes(self) -> int:
        """Number of bytes that the stored tensors take."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())


def noise(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers.

    Args:
        shape: Shape of the result.
        like: Tensor whose dtype and device the result gets.
        generator: Random number generator. Defaults to the global one of the device.

    Returns:
        The random tensor.
    """
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)


SINGULAR = "the precision is singular and cannot be inverted: set prior_precision > 0"


def inverse_root(eigenvalues: Tensor) -> Tensor:
    """Return 1 / sqrt(eigenvalues).

    Args:
        eigenvalues: Eigenvalues of a precision.

    Returns:
        The inverse square roots, in the same shape.

    Raises:
        LimpetError: If an eigenvalue is not positive.
    """
    if not bool((eigenvalues > 0).all()):
        raise LimpetError(SINGULAR)
    return eigenvalues.rsqrt()


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor if it has the expected shape.

    Args:
        name: Name of the tensor, for the error message.
        tensor: Tensor to check.
        shape: Expected shape.

    Returns:
        The tensor, unchanged.

    Raises:
        ValueError: If the shape differs.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    return tensor


def metadata_number(metadata: Metadata, name: str) -> float:
    """Read a number from the metadata.

    Args:
        metadata: Metadata of a precision.
        name: Key to read.

    Returns:
        The number.

    Raises:
        ValueError: If it is missing or not a finite number >= 0.
    """
    return finite_number(name, metadata.get(name))


def optional_metadata_number(metadata: Metadata, name: str) -> float | None:
    """Read a number that may be missing from the metadata.

    Args:
        metadata: Metadata of a precision.
        name: Key to read.

    Returns:
        The number, or None if it is missing or None.

    Raises:
        ValueError: If it is not a finite number >= 0.
    """
    return None if metadata.get(name) is None else metadata_number(metadata, name)
