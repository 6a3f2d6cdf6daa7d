"""The eigenbasis of one factor of a Kronecker-factored precision, and how a task is added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limpet.precision.base import Metadata, check_shape
from limpet.precision.block_diagonal import (
    BlockDiagonal,
    Matrix,
    Orthogonal,
    Side,
    diagonal,
    find,
    joined,
    named,
    pieces,
    recut,
)
from limpet.precision.linalg import symmetric_eigen, widened
from limpet.precision.spiked import Spiked
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.validity import check_non_negative, check_orthonormal

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Basis:
    """Eigenbasis of one factor: orthonormal columns U, and the eigenvalues of the partial trace in it.

    Args:
        vectors: U, as stored. None is the identity.
        trace: Eigenvalues of the partial trace (..., n).
        diagonal: Whether the factor is diagonal, or approximated by its diagonal, so that U stays the identity.
        sizes: Sizes of the diagonal blocks that the factor is split into.
        rest: How U is stored between uses.
    """

    vectors: Orthogonal | None
    trace: Tensor
    diagonal: bool
    sizes: tuple[int, ...]
    rest: Storage = AS_USED

    @property
    def truncated(self) -> bool:
        """Whether only some eigenvectors are stored, and one eigenvalue for all others."""
        return False

    @property
    def columns(self) -> Orthogonal | None:
        """U in the dtype and on the device of use. None is the identity."""
        return None if self.vectors is None else self.vectors.to(self.trace.device, self.trace.dtype)

    @property
    def length(self) -> int:
        """Number of eigenvalues that are stored: one for every column of U."""
        return sum(self.sizes)

    @property
    def counts(self) -> Tensor:
        """How many columns of U each of the stored eigenvalues belongs to."""
        return self.trace.new_ones(self.length)

    def spread(self, values: Tensor) -> Tensor:
        """Return one eigenvalue for every column of U, along the last dimension, from the stored ones."""
        return values

    @property
    def rounded(self) -> bool:
        """Whether U is stored in reduced precision, and so is only approximately orthonormal."""
        return self.rest.dtype is not None and self.vectors is not None

    def check(self, name: str) -> None:
        """Raise ValueError unless the basis is orthonormal and the eigenvalues are not negative.

        Args:
            name: Name of the basis, for the error message.
        """
        check_non_negative(f"{name}.trace", self.trace)
        if self.diagonal and self.vectors is not None:
            raise ValueError(f"{name} is diagonal, but has eigenvectors")
        for part in () if self.columns is None else pieces(self.columns):
            check_orthonormal(f"{name}.vectors", part, self.rest.epsilon)

    def take(self, factor: Side, weight: Tensor) -> tuple[Basis, Matrix | None, Tensor]:
        """Add weight * factor to the partial trace.

        Args:
            factor: Kronecker factor of the new term.
            weight: Multiplier, one number for each group.

        Returns:
            The new basis, the squared change of basis from old to new (None if it is the identity, or if there is
            nothing old), and the diagonal of the factor in the new basis.
        """
        return self._taken(factor, weight, first=self.vectors is None and not bool(self.trace.any()))

    def _taken(self, factor: Side, weight: Tensor, *, first: bool) -> tuple[Basis, Matrix | None, Tensor]:
        """Apply `take`; the factor of a first task is diagonal in the new basis."""
        if isinstance(factor, BlockDiagonal):
            return self._take_by_piece(factor.pieces, weight, first=first)
        assert isinstance(factor, Tensor)
        old = widened(self.trace)
        if self.diagonal:
            return self._keep(None, old + weight * widened(factor)), None, widened(factor)
        if first:
            values, new = symmetric_eigen(factor)
            return self._keep(new, weight * values), None, values
        known = None if self.vectors is None else pieces(self.vectors)[0].to(self.trace.device)
        # Converted to float64 twice, so that no copy is alive during the eigendecomposition, when memory use peaks.
        values, new = symmetric_eigen(summed(known, old) + weight.unsqueeze(-1) * widened(factor))
        carry = new.mT.square() if known is None else (new.mT @ widened(known)).square_()
        # Stored bases are rounded, so columns sum to 1 only approximately; normalized, they preserve the trace.
        carry /= carry.sum(-2, keepdim=True)
        in_basis = (widened(factor) @ new).mul_(new).sum(-2)
        return self._keep(new, values), carry, in_basis

    def _take_by_piece(
        self, factor: Sequence[Tensor], weight: Tensor, *, first: bool
    ) -> tuple[Basis, Matrix | None, Tensor]:
        """Apply `take` to each diagonal block."""
        known = [None] * len(self.sizes) if self.vectors is None else pieces(self.vectors)
        taken = [
            Basis(vectors, trace, False, (size,), self.rest)._taken(piece, weight, first=first)
            for piece, vectors, trace, size in zip(
                factor, known, self.trace.split_with_sizes(self.sizes, -1), self.sizes, strict=True
            )
        ]
        vectors = joined([part for basis, _, _ in taken for part in pieces(_not_none(basis.vectors))])
        carry = None if first else joined([part for _, carry, _ in taken for part in pieces(_not_none(carry))])
        trace = torch.cat([basis.trace for basis, _, _ in taken], -1)
        return replace(self, vectors=vectors, trace=trace), carry, torch.cat([values for _, _, values in taken], -1)

    def _keep(self, vectors: Tensor | None, trace: Tensor) -> Basis:
        """Return the basis with these eigenvectors and eigenvalues, stored as specified by `rest`."""
        like = self.trace
        # Contiguous, so that a memory loaded from a file gives bit-identical products.
        kept = None if vectors is None else self.rest.lay(vectors.to(like.device, like.dtype).contiguous())
        return replace(self, vectors=kept, trace=trace.to(like.device, like.dtype))

    def scaled(self, factor: float) -> Self:
        """Return the basis of `factor` times the partial trace."""
        return replace(self, trace=factor * self.trace)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = {f"{name}.trace": self.trace}
        if self.vectors is None:
            return kept
        return kept | named(f"{name}.vectors", joined(pieces(self.vectors)))

    def metadata(self, name: str) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        found: dict[str, Any] = {f"{name}_diagonal": self.diagonal}
        return found | {f"{name}_sizes": list(self.sizes)} if len(self.sizes) > 1 else found

    @classmethod
    def restore(cls, name: str, shape: Sequence[int], tensors: Mapping[str, Tensor], metadata: Metadata) -> Basis:
        """Rebuild a basis from its `tensors` and `metadata`.

        Args:
            name: Name under which it was saved.
            shape: Groups of the block, and the size of the factor.
            tensors: Tensors by name.
            metadata: Numbers by name.

        Returns:
            The basis.

        Raises:
            ValueError: If a tensor or number does not fit.
        """
        *groups, size = shape
        rest = Storage.of(metadata)
        trace = check_shape(f"{name}.trace", tensors[f"{name}.trace"], (*groups, size))
        sizes = tuple(map(int, metadata.get(f"{name}_sizes", [size])))
        if sum(sizes) != size or min(sizes, default=0) < min(size, 1):
            raise ValueError(f"{name}_sizes are {sizes}, which do not sum to the size of the factor, {size}")
        vectors = find(f"{name}.vectors", tensors)
        if vectors is not None:
            each = zip(pieces(vectors), sizes, strict=True)
            checked = [check_shape(f"{name}.vectors", part, (*groups, n, n)) for part, n in each]
            vectors = joined([rest.lay(part) for part in checked])
        return Basis(vectors, trace, bool(metadata[f"{name}_diagonal"]), sizes, rest)


def as_side(factor: Side, is_diagonal: bool, basis: Basis) -> Side:
    """Convert a Kronecker factor to the form of its basis: a diagonal, a full matrix or diagonal blocks.

    Args:
        factor: Matrix (..., n, n) in any form, or its diagonal (..., n). One of low rank plus a multiple of the
            identity keeps that form if the basis is truncated.
        is_diagonal: Whether `factor` is a diagonal.
        basis: Eigenbasis of that factor in the block's precision.

    Returns:
        The factor, in its own dtype.
    """
    if basis.diagonal:
        return diagonal(factor, is_diagonal)
    if isinstance(factor, Spiked):
        if basis.truncated:
            return factor.widened()
        factor = factor.dense()
    if isinstance(factor, Tensor) and is_diagonal:
        return joined([torch.diag_embed(part) for part in factor.split_with_sizes(basis.sizes, -1)])
    return recut(factor, basis.sizes)


def widened_side(factor: Side, is_diagonal: bool, basis: Basis) -> Side:
    """Convert a Kronecker factor to the form of its basis (`as_side`), in float64."""
    side = as_side(factor, is_diagonal, basis)
    return side if isinstance(side, Spiked) else joined([widened(part) for part in pieces(side)])


def summed(vectors: Tensor | None, values: Tensor) -> Tensor:
    """Build a matrix from its eigendecomposition.

    Args:
        vectors: Orthonormal eigenvectors (..., n, n). None is the identity.
        values: Eigenvalues (..., n), in float64.

    Returns:
        The matrix (..., n, n), in float64.
    """
    if vectors is None:
        return torch.diag_embed(values)
    vectors = widened(vectors)
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _not_none(matrix: Orthogonal | None) -> Orthogonal:
    """Narrow the type of a matrix that is known not to be None."""
    assert matrix is not None
    return matrix
