"""Two curvatures of one block in one basis, and the path between what each of them wants.

A block has moved by D from where the old data left it. With O the curvature of the old data and N that of the new,

    X(strength) = argmin over X of  1/2 |X - D|^2_N + strength/2 |X|^2_O    (|X|^2_M = vec(X)^T M vec(X))

keeps of D what the new data need and gives back what the old data need. Where N and O are diagonal in one basis B,
B^T N B = I and B^T O B = diag(t), it is X = B [c / (1 + strength t)] with c = B^-1 D, so that one decomposition serves
every strength. Each structure of a precision has such a basis: its own for diagonals, a generalised eigenproblem for
dense matrices, and one for each side of a Kronecker product (`kronecker_pencil`).

This is mode-IMM (Lee et al. 2017, "Overcoming catastrophic forgetting by incremental moment matching") for structured
curvatures; MaTS (Tam et al. 2023, "Merging by matching models in task parameter subspaces") solves the same kind of
system to merge models.

Curvature that was estimated from few examples says that a direction costs nothing where it was only never seen, so it
is damped: M + e mean(diag M) I for M = O, N, or their Kronecker factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.base import Precision
from limpet.precision.dense import Dense
from limpet.precision.diagonal import Diagonal
from limpet.precision.linalg import generalised_eigen, widened
from limpet.precision.terms import DenseTerm, DiagonalTerm, Term


@dataclass(frozen=True)
class Damping:
    """What is added to the diagonals of the old and the new curvature, relative to their means."""

    old: float = 0.01
    new: float = 0.1


class Pencil(ABC):
    """The path X(strength) of one block, for one or several displacements (`parts`) that add up to D.

    X is linear in D, so each part has its own share of it. Only some columns may move; the others, in which D is zero,
    stay where they are.
    """

    @abstractmethod
    def at(self, strength: float) -> list[Tensor]:
        """Each part's share of X(strength), in the shape of the block.

        Args:
            strength: What the old curvature is multiplied by.

        Returns:
            One tensor for every part.
        """

    @abstractmethod
    def quadratics(self, strength: float) -> tuple[float, float]:
        """1/2 |X - D|^2_N and 1/2 |X|^2_O, both with their damping.

        Args:
            strength: What the old curvature is multiplied by.

        Returns:
            The new quadratic, which grows along the path, and the old one, which falls.
        """

    @abstractmethod
    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """A matrix of low rank that is near to scale times a part's share of X(strength), less the first one's offset.

        Near in the metric of both curvatures, each divided by its mean, or the product that is nearest to it: a
        truncated singular value decomposition in coordinates where that metric is the identity. Dense blocks have no
        such product, and are cut in the Euclidean metric.

        Args:
            strength: What the old curvature is multiplied by.
            part: Which part.
            rank: The rank.
            scale: What X is multiplied by.

        Returns:
            left (rows, rank) and right (rank, columns), whose product it is.
        """


def pencil(
    old: Precision,
    new: Sequence[Term],
    parts: Sequence[Tensor],
    *,
    columns: slice,
    slope: Tensor | None = None,
    offset: Tensor | None = None,
    damping: Damping | None = None,
) -> Pencil:
    """The path of a block between an old and a new curvature.

    Args:
        old: The precision of the block. Only its Fisher counts, without its prior and strengths.
        new: The Fisher of the block on the new data, as a curvature pass gives it.
        parts: Tensors in the shape of the block that add up to D.
        columns: The columns that may move.
        slope: The linear term of the old penalty, where that is not centred at X = 0.
        offset: What `low_rank` takes off the first part.
        damping: What is added to the diagonals.

    Returns:
        The path, in the dtype of the parts.
    """
    from limpet.precision.kronecker_pencil import KroneckerPencil

    kinds: dict[type[Precision], Callable[..., Pencil]] = {Diagonal: DiagonalPencil, Dense: DensePencil}
    kind = kinds.get(type(old), KroneckerPencil)
    return kind(old, new, parts, columns=columns, slope=slope, offset=offset, damping=damping)


class DiagonalPencil(Pencil):
    """Both curvatures diagonal: X = (n D - strength slope) / (n + strength o)."""

    def __init__(
        self,
        old: Diagonal,
        new: Sequence[Term],
        parts: Sequence[Tensor],
        *,
        columns: slice,
        slope: Tensor | None = None,
        offset: Tensor | None = None,
        damping: Damping | None = None,
    ) -> None:
        damping = damping or Damping()
        self.like, self.parts = parts[0], [widened(part) for part in parts]
        self.offset = None if offset is None else widened(offset)
        n = torch.stack([widened(term.diagonal) for term in new if isinstance(term, DiagonalTerm)]).sum(0)
        o = widened(old.fisher().values.plain)
        self.new, self.old = n + damping.new * n.mean(), o + damping.old * o.mean()
        self.slope = None
        if slope is not None:
            self.slope = torch.zeros_like(self.parts[0])
            self.slope[..., columns] = widened(slope)[..., columns] / len(parts)

    def _solved(self, strength: float) -> list[Tensor]:
        pull = 0 if self.slope is None else strength * self.slope
        return [(self.new * part - pull) / (self.new + strength * self.old) for part in self.parts]

    def at(self, strength: float) -> list[Tensor]:
        return [x.to(self.like) for x in self._solved(strength)]

    def quadratics(self, strength: float) -> tuple[float, float]:
        x, d = sum_of(self._solved(strength)), sum_of(self.parts)
        return float((self.new * (x - d).square()).sum()) / 2, float((self.old * x.square()).sum()) / 2

    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        metric = self.new / self.new.mean() + self.old / self.old.mean()
        rows, columns = metric.mean(-1).sqrt(), (metric.mean(-2) / metric.mean()).sqrt()
        x = scale * self._solved(strength)[part] - (0 if part or self.offset is None else self.offset)
        left, right = truncated(rows.unsqueeze(-1) * x * columns, rank)
        return (left / rows.unsqueeze(-1)).to(self.like), (right / columns).to(self.like)


class DensePencil(Pencil):
    """Whole matrices: one generalised eigenproblem over the columns that have moved."""

    def __init__(
        self,
        old: Dense,
        new: Sequence[Term],
        parts: Sequence[Tensor],
        *,
        columns: slice,
        slope: Tensor | None = None,
        offset: Tensor | None = None,
        damping: Damping | None = None,
    ) -> None:
        damping = damping or Damping()
        self.like, self.shape = parts[0], parts[0].shape
        self.offset = None if offset is None else widened(offset)
        self.index = (
            torch.arange(self.shape.numel(), device=self.like.device).reshape(self.shape)[..., columns].flatten()
        )
        n = torch.stack([widened(term.matrix) for term in new if isinstance(term, DenseTerm)]).sum(0)
        o = widened(old.fisher().matrix.plain)
        n, o = (matrix[self.index.unsqueeze(1), self.index] for matrix in (n, o))
        self.vectors, dual, self.values = generalised_eigen(damped(n, damping.new), damped(o, damping.old))
        self.coordinates = [dual.mT @ self._flat(part) for part in parts]
        self.pull = None if slope is None else self.vectors.mT @ self._flat(slope) / len(parts)

    def _flat(self, part: Tensor) -> Tensor:
        return widened(part).flatten()[self.index]

    def _solved(self, strength: float) -> list[Tensor]:
        pull = 0 if self.pull is None else strength * self.pull
        return [(c - pull) / (1 + strength * self.values) for c in self.coordinates]

    def _block(self, coordinates: Tensor) -> Tensor:
        block = torch.zeros(self.shape.numel(), dtype=coordinates.dtype, device=coordinates.device)
        block[self.index] = self.vectors @ coordinates
        return block.reshape(self.shape)

    def at(self, strength: float) -> list[Tensor]:
        return [self._block(x).to(self.like) for x in self._solved(strength)]

    def quadratics(self, strength: float) -> tuple[float, float]:
        x, c = sum_of(self._solved(strength)), sum_of(self.coordinates)
        return float((x - c).square().sum()) / 2, float((self.values * x.square()).sum()) / 2

    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x = scale * self._block(self._solved(strength)[part]) - (0 if part or self.offset is None else self.offset)
        left, right = truncated(x, rank)
        return left.to(self.like), right.to(self.like)


def damped(factor: Tensor, amount: float, *, is_diagonal: bool = False) -> Tensor:
    """M + amount mean(diag M) I for matrices (..., n, n), or for their diagonals (..., n)."""
    entries = factor if is_diagonal else factor.diagonal(dim1=-2, dim2=-1)
    # never quite zero, so that a part that no example has touched (a dead group) does not make it singular
    added = (amount * entries.mean(-1, keepdim=True)).clamp_min(SMALLEST).expand(entries.shape)
    return factor + (added if is_diagonal else torch.diag_embed(added))


SMALLEST = 1e-30
"""What is added to a diagonal at the least."""

OVERSAMPLING, POWERS = 8, 4
"""Directions beyond the rank, and power iterations, of the randomised range finder."""


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of a matrix by left @ right of this rank, both of the same size, in float64.

    From the singular values of the matrix on a subspace: all of it, or for a rank that is small beside the matrix the
    one that a randomised range finder with power iterations gives (Halko, Martinsson and Tropp 2011, algorithm 4.4),
    always from the same random numbers.

    >>> matrix = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> left, right = truncated(matrix, 1)
    >>> (left @ right).round().abs()
    tensor([[2., 0., 0.],
            [0., 0., 0.]], dtype=torch.float64)
    """
    matrix = widened(matrix)
    if min(matrix.shape) > 4 * (rank + OVERSAMPLING):
        basis = _range(matrix, rank + OVERSAMPLING)
        u, values, v = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
        u = basis @ u
    else:
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return u[:, :rank] * root, root.unsqueeze(-1) * v[:rank]


def _range(matrix: Tensor, size: int) -> Tensor:
    """Orthonormal columns that span nearly what the largest singular vectors do."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[1], size, dtype=matrix.dtype, generator=generator).to(matrix.device)
    basis: Tensor = torch.linalg.qr(matrix @ start)[0]
    for _ in range(POWERS):
        basis = torch.linalg.qr(matrix.mT @ basis)[0]
        basis = torch.linalg.qr(matrix @ basis)[0]
    return basis


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The parts, added up."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)
