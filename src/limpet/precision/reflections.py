"""Orthogonal matrices as products of reflections, which complete a few eigenvectors to a basis of the whole space.

A factor that is truncated to rank r keeps r eigenvectors U (n, r) and is isotropic on their complement. Any orthonormal
basis of the complement will do, so it is not stored: r Householder reflections map the first r unit vectors to the
columns of U (up to their signs), and their product

    Q = H_1 ... H_r = I - V T V^T,    inverse of T = strict upper triangle of V^T V + half of its diagonal

is a complete basis (the UT transform: Joffrain et al. 2006, "Accumulating Householder transformations, revisited").
Multiplying a matrix (n, m) by Q takes 4 n r m operations instead of 2 n^2 m. Q is orthogonal for every V, so one that
was stored in few digits has slightly other directions, but stays orthonormal.

V is unit lower trapezoidal. In 8 bits, what is below its diagonal is stored as whole numbers from -127 to 127, with one
scale per column: an eigenvector then changes by about 1 % of its length. That is too much for the first few, whose
eigenvalues are orders of magnitude larger than the others: the first columns are stored in float16 instead, eight at
most. Column j of Q depends on the first j columns of V alone, so eigenvectors are to be in descending order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.precision.linalg import widened
from limpet.precision.storage import EIGHT_BITS, Storage

LEADING = 8
"""Largest number of columns that are stored in float16 when the others are in 8 bits."""


def leading_columns(rank: int) -> int:
    """Return how many columns are stored in float16 when the others are in 8 bits: one of four, and eight at most."""
    return min(LEADING, rank // 4)


@dataclass(frozen=True)
class Reflections:
    """Orthogonal matrix Q = I - V T V^T.

    Args:
        vectors: V (..., n, r), as stored; without its first columns if there are `leading` ones.
        triangle: T (..., r, r), in float32 or wider.
        transposed: Whether this is Q^T instead of Q.
        scale: Scales of the columns of `vectors`, if they are stored in 8 bits.
        leading: The first columns of V in float16 (..., n, m), if the others are in 8 bits. None of ranks
            below four, and in older files.

    Examples:
        >>> basis = Reflections.completing(torch.tensor([[0.6], [0.8], [0.0]]))
        >>> basis.dense()[:, 0].abs()
        tensor([0.6000, 0.8000, 0.0000])
        >>> torch.allclose(basis.mT @ basis.dense(), torch.eye(3), atol=1e-6)
        True
    """

    vectors: Tensor
    triangle: Tensor
    transposed: bool = False
    scale: Tensor | None = None
    leading: Tensor | None = None

    @classmethod
    def completing(cls, columns: Tensor) -> Reflections:
        """Complete orthonormal columns to a basis, in float64 within.

        Args:
            columns: Orthonormal columns U (..., n, r), with r at most n.

        Returns:
            The basis, whose first r columns are those of U up to their signs.
        """
        packed, _ = torch.geqrf(widened(columns))
        unit = torch.eye(*columns.shape[-2:], dtype=packed.dtype, device=packed.device)
        return cls.of((packed.tril(-1) + unit).to(columns.device, columns.dtype))

    @classmethod
    def of(cls, vectors: Tensor, scale: Tensor | None = None, leading: Tensor | None = None) -> Reflections:
        """Create the product of reflections along given vectors.

        Args:
            vectors: V (..., n, r), in any floating-point dtype, or in 8 bits and without the `leading` columns.
            scale: Scales of these columns, if they are in 8 bits.
            leading: The first columns in float16, if the others are in 8 bits.

        Returns:
            The orthogonal matrix.
        """
        wide = widened(_unpacked(vectors, scale, leading))
        gram = wide.mT @ wide
        inverse = gram.triu(1) + torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1) / 2)
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        triangle = torch.linalg.solve_triangular(inverse, identity, upper=True)
        dtype = torch.float32 if scale is not None else torch.promote_types(vectors.dtype, torch.float32)
        return cls(vectors, triangle.to(vectors.device, dtype), scale=scale, leading=leading)

    def laid(self, rest: Storage) -> Reflections:
        """Return the matrix as it is stored between uses.

        Args:
            rest: How it is stored.

        Returns:
            The matrix, with slightly other directions if the storage dtype has fewer digits.
        """
        if rest.dtype != EIGHT_BITS:
            return Reflections.of(rest.lay(self.vectors))
        first = leading_columns(self.rank)
        leading, below = self.vectors.tril(-1).split_with_sizes([first, self.rank - first], -1)
        scale = below.abs().amax(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        where = "cpu" if rest.offload else below.device
        packed = (below / scale).round().to(where, torch.int8)
        return Reflections.of(
            packed, scale.to(where, torch.float32), leading.to(where, torch.float16) if first else None
        )

    @property
    def rank(self) -> int:
        """Number of reflections r."""
        return self.triangle.shape[-1]

    @property
    def nbytes(self) -> int:
        """Number of bytes that the matrix takes."""
        stored = (self.vectors, self.triangle, self.scale, self.leading)
        return sum(tensor.nbytes for tensor in stored if tensor is not None)

    @property
    def sizes(self) -> list[int]:
        """Number of rows, as a list like that of a block-diagonal matrix."""
        return [self.vectors.shape[-2]]

    @property
    def mT(self) -> Reflections:  # noqa: N802
        """The transpose, named as in `torch.Tensor`."""
        return replace(self, transposed=not self.transposed)

    @property
    def _dtype(self) -> torch.dtype:
        return self.vectors.dtype if self.scale is None else self.scale.dtype

    @property
    def _middle(self) -> Tensor:
        return self.triangle.mT if self.transposed else self.triangle

    def __matmul__(self, x: Tensor) -> Tensor:
        v = _unpacked(self.vectors, self.scale, self.leading)
        return x - v @ (self._middle @ (v.mT @ x))

    def __rmatmul__(self, x: Tensor) -> Tensor:
        v = _unpacked(self.vectors, self.scale, self.leading)
        return x - ((x @ v) @ self._middle) @ v.mT

    def weighted(self, values: Tensor, x: Tensor) -> Tensor:
        """Compute ((x Q) * values) Q^T for values that are equal in all columns of the complement.

        With Q_1, the first r columns of Q, that is values_r x + ((x Q_1) * (values - values_r)) Q_1^T. Because V is
        unit lower trapezoidal, x Q_1 takes one product with V: half the operations of a rotation and its inverse.

        Args:
            values: Factors (n,) or (m, n); those in all columns after the first r are equal.
            x: Matrix (m, n).

        Returns:
            The product (m, n), differentiable in x.
        """
        assert not self.transposed
        v, rank = _unpacked(self.vectors, self.scale, self.leading), self.rank
        square, rest = v[:rank], values[..., rank, None]
        scaled = torch.addmm(x[:, :rank], (x @ v) @ self.triangle, square.mT, alpha=-1) * (values[..., :rank] - rest)
        kept = F.pad(scaled, (0, x.shape[1] - rank)).addcmul_(x, rest)
        return torch.addmm(kept, (scaled @ square) @ self.triangle.mT, v.mT, alpha=-1)

    def first(self) -> Tensor:
        """Return the first r columns of Q: the eigenvectors that were completed."""
        *groups, n, _ = self.vectors.shape
        unit = torch.eye(n, self.rank, dtype=self._dtype, device=self.vectors.device)
        return self @ unit.expand(*groups, n, self.rank)

    def dense(self) -> Tensor:
        """Return Q with all its entries."""
        n = self.vectors.shape[-2]
        identity = torch.eye(n, dtype=self._dtype, device=self.vectors.device)
        return self @ identity.expand(*self.vectors.shape[:-2], n, n)

    def square(self) -> Tensor:
        """Return the elementwise square of Q."""
        return self.dense().square()

    def to(self, device: torch.device, dtype: torch.dtype) -> Reflections:
        """Return the matrix on another device and in another floating-point dtype.

        Args:
            device: Target device.
            dtype: Target dtype.

        Returns:
            The converted matrix.
        """
        if self.scale is None and (self.vectors.device, self.vectors.dtype) == (device, dtype):
            return self
        vectors = _unpacked(self.vectors, self.scale, self.leading).to(device, dtype)
        return Reflections(vectors, self.triangle.to(device, dtype), self.transposed)


def _unpacked(vectors: Tensor, scale: Tensor | None, leading: Tensor | None) -> Tensor:
    """Return V in floating point."""
    if scale is None:
        return vectors
    found = vectors * scale
    if leading is not None:
        found = torch.cat([leading.to(found), found], -1)
    unit = torch.eye(*found.shape[-2:], dtype=scale.dtype, device=scale.device)
    return found.tril(-1) + unit
