"""Matrices of low rank plus a multiple of the identity, as covariances in the spiked model (Johnstone 2001).

    M = W diag(c) W^T + s I,    W (n, m), m much smaller than n

Kronecker factors of long sides have this form: a few leading eigenvectors, and the mean of the other eigenvalues. Sums,
multiples and principal submatrices of such matrices have it too, so none of them is ever written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.linalg import all_finite, symmetric_eigen, widened


@dataclass(frozen=True)
class Spiked:
    """The matrix W diag(c) W^T + s I.

    Args:
        columns: W, of shape (..., n, m).
        weights: c, of shape (..., m).
        shift: s, of shape (...).

    Examples:
        >>> matrix = Spiked(torch.tensor([[1.0], [0.0]]), torch.tensor([2.0]), torch.tensor(1.0))
        >>> matrix.dense()
        tensor([[3., 0.],
                [0., 1.]])
    """

    columns: Tensor
    weights: Tensor
    shift: Tensor

    @classmethod
    def of_eigen(cls, vectors: Tensor, values: Tensor, rest: Tensor) -> Spiked:
        """Create the matrix with given eigenvalues, and another one on the complement of their eigenvectors.

        Args:
            vectors: Orthonormal eigenvectors (..., n, m).
            values: Their eigenvalues (..., m).
            rest: The eigenvalue on the complement (...).

        Returns:
            The matrix.
        """
        return cls(vectors, values - rest.unsqueeze(-1), rest)

    @property
    def size(self) -> int:
        """Number of rows n."""
        return self.columns.shape[-2]

    @property
    def rank(self) -> int:
        """Number of columns m of W."""
        return self.columns.shape[-1]

    def __matmul__(self, v: Tensor) -> Tensor:
        shift = self.shift.unsqueeze(-1).unsqueeze(-1)
        return self.columns @ (self.weights.unsqueeze(-1) * (self.columns.mT @ v)) + shift * v

    def __rmatmul__(self, v: Tensor) -> Tensor:
        return (self @ v.mT).mT

    def __mul__(self, factor: Tensor | float) -> Spiked:
        """Multiply by a number, or by one for each of the leading dimensions."""
        each = factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor
        return Spiked(self.columns, self.weights * each, self.shift * factor)

    def __truediv__(self, divisor: float) -> Spiked:
        return self * (1 / divisor)

    def __add__(self, other: Spiked) -> Spiked:
        columns = torch.cat([self.columns, other.columns], -1)
        return Spiked(columns, torch.cat([self.weights, other.weights], -1), self.shift + other.shift)

    def kept(self, rows: slice) -> Spiked:
        """Return the submatrix of the rows and columns in a slice."""
        return Spiked(self.columns[..., rows, :], self.weights, self.shift)

    def shifted(self, amount: Tensor) -> Spiked:
        """Return the matrix with `amount` (...) added to its diagonal."""
        return Spiked(self.columns, self.weights, self.shift + amount)

    def to(self, device: torch.device, dtype: torch.dtype) -> Spiked:
        """Return the matrix on another device and in another dtype.

        Args:
            device: Target device.
            dtype: Target dtype.

        Returns:
            The converted matrix.
        """
        return Spiked(*(tensor.to(device, dtype) for tensor in (self.columns, self.weights, self.shift)))

    def widened(self) -> Spiked:
        """Return the matrix in float64."""
        return Spiked(widened(self.columns), widened(self.weights), widened(self.shift))

    def diagonal(self) -> Tensor:
        """Return the diagonal (..., n)."""
        return (self.columns.square() @ self.weights.unsqueeze(-1)).squeeze(-1) + self.shift.unsqueeze(-1)

    def is_finite(self) -> bool:
        """Return whether all numbers are finite."""
        return all(map(all_finite, (self.columns, self.weights, self.shift)))

    def dense(self) -> Tensor:
        """Return the matrix with all its entries (..., n, n)."""
        shift = self.shift.unsqueeze(-1).expand(*self.shift.shape, self.size)
        return (self.columns * self.weights.unsqueeze(-2)) @ self.columns.mT + torch.diag_embed(shift)

    def projected(self, basis: Tensor) -> Tensor:
        """Return B^T M B for orthonormal columns B (..., n, k)."""
        inside = basis.mT @ self.columns
        shift = self.shift.unsqueeze(-1).expand(*self.shift.shape, basis.shape[-1])
        return (inside * self.weights.unsqueeze(-2)) @ inside.mT + torch.diag_embed(shift)

    def top_eigen(self, rank: int) -> tuple[Tensor, Tensor]:
        """Compute the largest eigenvalues within the span of W, and their eigenvectors.

        Args:
            rank: Number of eigenvalues, at most m.

        Returns:
            The eigenvalues (..., rank), ascending and clamped at 0, and orthonormal eigenvectors (..., n, rank).

        Raises:
            LimpetError: If an entry is inf or nan.
        """
        span = torch.linalg.qr(widened(self.columns))[0]
        values, vectors = symmetric_eigen(self.widened().projected(span))
        return values[..., -rank:], span @ vectors[..., -rank:]
