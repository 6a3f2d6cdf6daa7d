"""The basis that diagonalizes two matrices of low rank plus a multiple of the identity, without writing it out.

Both matrices are multiples of the identity on the complement of the columns of both. With Q an orthogonal matrix whose
first m columns span these columns, and E, E^-T the generalized eigenbasis of the two projections onto them,

    V = Q diag(E, I / sqrt(s)),    V^-T = Q diag(E^-T, sqrt(s) I),    s the new matrix on the complement.

Q is a product of m reflections (`limpet.precision.reflections`), so a product with V takes about 4 n m operations per
row instead of 2 n^2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from limpet.precision.linalg import generalised_eigen
from limpet.precision.reflections import Reflections
from limpet.precision.spiked import Spiked

LARGEST_PART = 0.5
"""Largest m / n for which this is used. Above it, complete matrices are as fast."""


@dataclass(frozen=True)
class SpikedBasis:
    """The matrix Q diag(E, a I), which is used as `x @ matrix` and `x @ matrix.mT`.

    Args:
        reflections: Q.
        inner: E, of shape (..., m, m).
        scale: a, of shape (...).
        transposed: Whether it is the transpose of that matrix.
    """

    reflections: Reflections
    inner: Tensor
    scale: Tensor
    transposed: bool = False

    @property
    def mT(self) -> SpikedBasis:  # noqa: N802
        """The transpose, named as in `torch.Tensor`."""
        return replace(self, transposed=not self.transposed)

    def to(self, device: torch.device, dtype: torch.dtype) -> SpikedBasis:
        """Return the matrix on another device and in another dtype."""
        inner, scale = self.inner.to(device, dtype), self.scale.to(device, dtype)
        return SpikedBasis(self.reflections.to(device, dtype), inner, scale, self.transposed)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        m, scale = self.inner.shape[-1], self.scale.unsqueeze(-1).unsqueeze(-1)
        if self.transposed:
            return torch.cat([x[..., :m] @ self.inner.mT, scale * x[..., m:]], -1) @ self.reflections.mT
        x = x @ self.reflections
        return torch.cat([x[..., :m] @ self.inner, scale * x[..., m:]], -1)

    def squared_lengths(self) -> Tensor:
        """Return the sums of the squared entries of each column (..., n)."""
        (n,) = self.reflections.sizes
        rest = self.scale.square().unsqueeze(-1).expand(*self.scale.shape, n - self.inner.shape[-1])
        return torch.cat([self.inner.square().sum(-2), rest], -1)

    def diagonal_of(self, matrix: Spiked) -> Tensor:
        """Return the diagonal of V^T M V (..., n)."""
        overlap = (matrix.columns.mT @ self).square()
        return (matrix.weights.unsqueeze(-2) @ overlap).squeeze(-2) + matrix.shift.unsqueeze(
            -1
        ) * self.squared_lengths()


def generalized_basis(new: Spiked, old: Spiked) -> tuple[SpikedBasis, SpikedBasis, Tensor] | None:
    """Solve the generalized eigenproblem V^T new V = I and V^T old V = diag(s), in float64.

    Args:
        new: Positive definite matrix.
        old: Positive semi-definite matrix of the same size.

    Returns:
        V, V^-T and s; None if the two have too many columns for this to be worth it.

    Raises:
        LimpetError: If `new` is not positive definite, or an entry is inf or nan.
    """
    new, old = new.widened(), old.widened()
    columns = torch.cat([new.columns, old.columns], -1)
    n, m = columns.shape[-2:]
    if m > LARGEST_PART * n:
        return None
    reflections = Reflections.completing(torch.linalg.qr(columns)[0])
    span = reflections.first()
    inner, dual, values = generalised_eigen(new.projected(span), old.projected(span))
    rest = (old.shift / new.shift).unsqueeze(-1).expand(*new.shift.shape, n - m)
    scale = new.shift.rsqrt()
    vectors, duals = SpikedBasis(reflections, inner, scale), SpikedBasis(reflections, dual, 1 / scale)
    return vectors, duals, torch.cat([values, rest], -1)
