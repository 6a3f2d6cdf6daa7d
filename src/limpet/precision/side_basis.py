"""One factor of a Kronecker product, and the basis that diagonalises two such factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.basis import Basis
from limpet.precision.block_diagonal import Matrix, Side, diagonal, joined, pieces
from limpet.precision.linalg import generalised_eigen, widened
from limpet.precision.pencil import SMALLEST, damped
from limpet.precision.reflections import Reflections
from limpet.precision.spiked import Spiked
from limpet.precision.spiked_basis import SpikedBasis, generalized_basis


@dataclass(frozen=True)
class Factor:
    """One factor of a Kronecker product.

    Args:
        matrix: Matrix (..., n, n) in any form, or its diagonal (..., n).
        is_diagonal: Whether `matrix` is a diagonal.
    """

    matrix: Side
    is_diagonal: bool

    def damped(self, amount: float) -> Factor:
        """Return the factor with `amount` times the mean of its diagonal added to the diagonal."""
        if self.is_diagonal and isinstance(self.matrix, Tensor):
            return Factor(damped(self.matrix, amount, is_diagonal=True), True)
        # One mean for all blocks, as if the factor were not split.
        added = (amount * self.diagonal.mean(-1, keepdim=True)).clamp_min(SMALLEST)
        if isinstance(self.matrix, Spiked):
            return Factor(self.matrix.shifted(added.squeeze(-1)), False)
        parts = [piece + torch.diag_embed(added.expand(piece.shape[:-1])) for piece in pieces(self.matrix)]
        return Factor(joined(parts), False)

    @property
    def diagonal(self) -> Tensor:
        """The diagonal (..., n)."""
        return diagonal(self.matrix, self.is_diagonal)

    def right(self, x: Tensor) -> Tensor:
        """Return x M."""
        if self.is_diagonal and isinstance(self.matrix, Tensor):
            return x * self.matrix.unsqueeze(-2)
        return x @ self.matrix

    def kept(self, columns: slice) -> Factor:
        """Return the submatrix of the rows and columns in a slice."""
        if self.is_diagonal and isinstance(self.matrix, Tensor):
            return Factor(self.matrix[..., columns], True)
        if isinstance(self.matrix, Spiked):
            return Factor(self.matrix.kept(columns), False)
        found, start = [], 0
        for piece in pieces(self.matrix):
            inside = slice(max(columns.start - start, 0), max(min(columns.stop - start, piece.shape[-1]), 0))
            if inside.start < inside.stop:
                found.append(piece[..., inside, inside])
            start += piece.shape[-1]
        return Factor(joined(found), False)

    def scaled(self, factor: Tensor | float) -> Factor:
        """Return `factor` times the matrix, with one number for all groups or one (..., 1) for each."""
        if isinstance(self.matrix, Spiked):
            return Factor(self.matrix * (factor.squeeze(-1) if isinstance(factor, Tensor) else factor), False)
        if isinstance(factor, Tensor) and not self.is_diagonal:
            factor = factor.unsqueeze(-1)
        return Factor(joined([piece * factor for piece in pieces(self.matrix)]), self.is_diagonal)

    def plus(self, other: Factor) -> Factor:
        """Return the sum of two factors, which are both diagonal or both not."""
        if isinstance(self.matrix, Spiked) and isinstance(other.matrix, Spiked):
            return Factor(self.matrix + other.matrix, False)
        both = zip(pieces(self.matrix), pieces(other.matrix), strict=True)
        return Factor(joined([a + b for a, b in both]), self.is_diagonal)

    def to(self, like: Tensor) -> Factor:
        """Return the same factor in the dtype and on the device of `like`."""
        return Factor(self.matrix.to(like.device, like.dtype), self.is_diagonal)


@dataclass(frozen=True)
class SideBasis:
    """Generalized eigenbasis of two factors: V^T N V = I, V^T O V = diag(values).

    Args:
        vectors: V, or its diagonal.
        dual: V^-T. None if `into` is no longer needed.
        values: Generalized eigenvalues (..., n).
        is_diagonal: Whether V is diagonal.
        root: Square root of the metric of both factors, each divided by its mean; the metric is diagonal in this basis.
    """

    vectors: Matrix | SpikedBasis
    dual: Matrix | SpikedBasis | None
    values: Tensor
    is_diagonal: bool
    root: Tensor

    @classmethod
    def of(cls, new: Factor, old: Factor) -> SideBasis:
        """Compute the basis of two damped factors of the same form.

        Args:
            new: Factor N of the new curvature.
            old: Factor O of the old curvature.

        Returns:
            The basis.
        """
        n, o = new.matrix, old.matrix
        vectors: Matrix | SpikedBasis
        dual: Matrix | SpikedBasis
        low_rank = generalized_basis(n, o) if isinstance(n, Spiked) and isinstance(o, Spiked) else None
        if low_rank is not None:
            vectors, dual, values = low_rank
        elif new.is_diagonal and isinstance(n, Tensor) and isinstance(o, Tensor):
            vectors, dual, values = n.rsqrt(), n.sqrt(), o / n
        else:
            found = [generalised_eigen(a, b) for a, b in zip(pieces(n), pieces(o), strict=True)]
            vectors, dual = joined([v for v, _, _ in found]), joined([w for _, w, _ in found])
            values = torch.cat([s for _, _, s in found], -1)
        means = (factor.diagonal.mean(-1, keepdim=True) for factor in (new, old))
        new_mean, old_mean = means
        return cls(vectors, dual, values, new.is_diagonal, (1 / new_mean + values / old_mean).sqrt())

    def _times(self, x: Tensor, matrix: Matrix | SpikedBasis, *, transposed: bool = False) -> Tensor:
        """Return x times a matrix, or its transpose, that may be stored as a diagonal."""
        if self.is_diagonal and isinstance(matrix, Tensor):
            return x * matrix.unsqueeze(-2)
        return x @ (matrix.mT if transposed else matrix)

    def into(self, x: Tensor) -> Tensor:
        """Return x V^-T, the coordinates of displacements."""
        assert self.dual is not None
        return self._times(x, self.dual)

    def back(self, c: Tensor) -> Tensor:
        """Return c V^T, the inverse of `into`."""
        return self._times(c, self.vectors, transposed=True)

    def into_dual(self, x: Tensor) -> Tensor:
        """Return x V, the coordinates of gradients."""
        return self._times(x, self.vectors)

    def diagonal_of(self, factor: Factor) -> Tensor:
        """Return the diagonal of V^T M V."""
        if self.is_diagonal and isinstance(self.vectors, Tensor):
            return factor.diagonal * self.vectors.square()
        if isinstance(self.vectors, SpikedBasis):
            assert isinstance(factor.matrix, Spiked)
            return self.vectors.diagonal_of(factor.matrix)
        both = zip(pieces(factor.matrix), pieces(self.vectors), strict=True)
        return torch.cat([((m @ v) * v).sum(-2) for m, v in both], -1)

    def carried(self, values: Tensor, basis: Basis, rows: slice) -> Tensor:
        """Return the diagonal of V^T U diag(values) U^T V, for an orthonormal basis U.

        The values are carried over with the squared entries of V^T U.

        Args:
            values: Eigenvalues in U, along the last dimension; of a truncated basis all are equal on the complement.
            basis: Basis that holds U.
            rows: Rows of U to use.

        Returns:
            The diagonal, along the last dimension.
        """
        if self.is_diagonal and isinstance(self.vectors, Tensor):
            return values[..., rows] * self.vectors.square()
        if isinstance(self.vectors, SpikedBasis):
            assert isinstance(basis.columns, Reflections)
            columns = widened(basis.columns.first())[..., rows, :]
            rest = values[..., -1:]
            overlap = (columns.mT @ self.vectors).square()
            return (values[..., : columns.shape[-1]] - rest) @ overlap + rest * self.vectors.squared_lengths()
        found, number, start = [], 0, 0
        for i, size in enumerate(basis.sizes):
            inside = slice(max(rows.start - start, 0), max(min(rows.stop - start, size), 0))
            if inside.start < inside.stop:
                v = pieces(self.vectors)[number]
                u = None if basis.columns is None else widened(pieces(basis.columns)[i])[..., inside, :]
                some = values[..., start : start + size]
                found.append(some @ (v if u is None else u.mT @ v).square())
                number += 1
            start += size
        return torch.cat(found, -1)

    def stored(self, like: Tensor, *, with_dual: bool) -> SideBasis:
        """Return the basis converted to the dtype and device of a tensor.

        Args:
            like: Tensor with the dtype and device to use.
            with_dual: Whether to include `dual`, which `into` requires.

        Returns:
            The converted basis.
        """
        vectors = self.vectors.to(like.device, like.dtype)
        dual = self.dual.to(like.device, like.dtype) if with_dual and self.dual is not None else None
        return SideBasis(vectors, dual, self.values.to(like), self.is_diagonal, self.root.to(like))
