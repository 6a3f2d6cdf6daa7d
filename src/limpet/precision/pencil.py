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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.linalg import widened


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
