"""Sketches of Kronecker factors that are too long to be summed in full.

    Y = A Omega,    A = sum of x x^T (n, n),    Omega (n, k) random with orthonormal columns

Y is a sum over examples like A itself, so a pass can be interrupted, resumed, and split among ranks, but it takes n k
numbers instead of n^2, and 2 n k operations per example. At the end A is recovered as

    A ~ Y (Omega^T Y)^-1 Y^T

the Nystrom approximation, positive semi-definite like A (Tropp, Yurtsever, Udell and Cevher 2017, "Fixed-rank
approximation of a positive-semidefinite matrix from streaming data", algorithm 3). What it leaves out is distributed
evenly, so that the trace is that of A, which is summed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.precision.linalg import NOT_FINITE, SUBSPACE_FROM, symmetric_eigen, widened
from limpet.precision.spiked import Spiked

COLUMNS = 2
"""Columns of Omega for each eigenvector that is wanted."""


def sketch_columns(size: int, rank: int | None) -> int | None:
    """Return how many columns the sketch of a factor has, or None if the factor is summed in full.

    Args:
        size: Number of rows n of the factor.
        rank: Number of eigenvectors that are kept of it. None keeps all.

    Returns:
        2 rank, if the rank is at most an eighth of the size: a sketch is then smaller, and takes fewer operations.
    """
    return None if rank is None or rank * SUBSPACE_FROM > size else COLUMNS * rank


@lru_cache(maxsize=16)
def _omega(size: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random orthonormal columns, the same for all factors of one size."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(size, columns, generator=generator, dtype=torch.float64)
    orthonormal: Tensor = torch.linalg.qr(drawn)[0]
    return orthonormal.to(device, dtype)


@dataclass(frozen=True)
class Sketch:
    """The sketch of a factor, a running sum.

    Args:
        product: Y, of shape (..., n, k).
        diagonal: The diagonal of A, of shape (..., n).
    """

    product: Tensor
    diagonal: Tensor

    @classmethod
    def zeros(cls, groups: Sequence[int], size: int, columns: int, like: Tensor) -> Sketch:
        """Create the sketch of zero.

        Args:
            groups: Leading dimensions.
            size: Number of rows n of the factor.
            columns: Number of columns k.
            like: Tensor with the dtype and device to use.

        Returns:
            The sketch.
        """
        return cls(like.new_zeros(*groups, size, columns), like.new_zeros(*groups, size))

    @property
    def omega(self) -> Tensor:
        """The matrix Omega."""
        return _omega(*self.product.shape[-2:], self.product.dtype, self.product.device)

    def add(self, rows: Tensor, *, ones: bool) -> None:
        """Add rows^T rows to A.

        Args:
            rows: The rows, of shape (..., rows, width).
            ones: Whether to append a column of ones to `rows`, without copying it.
        """
        rows, omega = rows.to(self.product.dtype), self.omega
        width = rows.shape[-1]
        projected = rows @ omega[:width]
        self.diagonal[..., :width] += rows.square().sum(-2)
        if ones:
            projected += omega[width]
            self.product[..., width, :] += projected.sum(-2)
            self.diagonal[..., width] += rows.shape[-2]
        if rows.dim() == 2:
            self.product[:width].addmm_(rows.mT, projected)
        else:
            self.product[..., :width, :] += rows.mT @ projected

    def named(self, name: str) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {f"{name}.sketch": self.product, f"{name}.diagonal": self.diagonal}

    @classmethod
    def find(cls, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Sketch | None:
        """Look up a sketch among named tensors, the inverse of `named`; None if there is none of that name."""
        if f"{name}.sketch" not in tensors:
            return None
        return cls(tensors[f"{name}.sketch"].to(device), tensors[f"{name}.diagonal"].to(device))

    def recovered(self) -> Spiked:
        """Recover the factor A, in the dtype of the sketch.

        Returns:
            The leading eigenvectors and eigenvalues of the approximation, and the mean of the rest of the trace.

        Raises:
            LimpetError: If an entry is inf or nan.
        """
        like = self.product
        if not bool(torch.isfinite(like).all() and torch.isfinite(self.diagonal).all()):
            raise LimpetError(NOT_FINITE)
        omega, product = widened(self.omega), widened(like)
        # a small multiple of the identity is added and subtracted again, because rounding may make A indefinite
        tiny = math.sqrt(like.shape[-2]) * torch.finfo(like.dtype).eps * product.norm(dim=(-2, -1), keepdim=True)
        product = product + tiny * omega
        inside, turn = symmetric_eigen(omega.mT @ product)
        floor = tiny.squeeze(-1).clamp_min(torch.finfo(like.dtype).tiny)
        half = product @ (turn / torch.maximum(inside, floor).sqrt().unsqueeze(-2))  # A is close to half half^T
        values, turn = (found.flip(-1) for found in symmetric_eigen(half.mT @ half))
        # the largest first, so that it is the small ones that rounding makes less accurate
        vectors = torch.linalg.qr(half @ (turn / torch.maximum(values, floor).sqrt().unsqueeze(-2)))[0]
        values = (values - tiny.squeeze(-1)).clamp_min(0)
        left = like.shape[-2] - like.shape[-1]
        rest = ((widened(self.diagonal).sum(-1) - values.sum(-1)) / left).clamp_min(0)
        return Spiked.of_eigen(vectors, values, rest).to(like.device, like.dtype)
