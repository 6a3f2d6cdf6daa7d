"""Interpolation between an old and a new optimum of one block, under the curvatures of both.

A block has moved by D from its weights after the old data. With O the curvature of the old data and N that of the new,

    X(strength) = argmin over X of  1/2 |X - D|^2_N + strength/2 |X|^2_O    (|X|^2_M = vec(X)^T M vec(X))

keeps the part of D that the new data need and undoes the part that hurts the old data. If N and O are diagonal in one
basis B, B^T N B = I and B^T O B = diag(t), the solution is X = B [c / (1 + strength t)] with c = B^-1 D, so that one
decomposition serves every strength. Each precision structure has such a basis: the standard basis for diagonals, the
generalized eigenbasis for dense matrices, and one generalized eigenbasis per factor for a Kronecker product
(`kronecker_pencil`).

This is mode-IMM (Lee et al. 2017, "Overcoming catastrophic forgetting by incremental moment matching") for structured
curvatures; MaTS (Tam et al. 2023, "Merging by matching models in task parameter subspaces") solves the same kind of
system to merge models.

Curvature estimated from few examples is zero in directions that no example has probed, which does not mean that they
are free. It is therefore damped: M + e mean(diag M) I for M = O, N, or their Kronecker factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.linalg import leading_range, widened


@dataclass(frozen=True)
class Damping:
    """Damping of the two curvatures: the value added to each diagonal, relative to the mean of that diagonal.

    Args:
        old: Damping of the curvature of the old data.
        new: Damping of the curvature of the new data.
    """

    old: float = 0.01
    new: float = 0.1


@dataclass(frozen=True)
class MovedBlock:
    """How training has moved a block, and what its path depends on besides the two curvatures.

    Args:
        parts: Tensors in the shape of the block that add up to the displacement D.
        columns: Columns that may move.
        linear_term: Linear term of the old penalty, if that is not centered at X = 0.
        offset: Subtracted from the first part in `Pencil.low_rank`.
        damping: Damping of both curvatures.
    """

    parts: Sequence[Tensor]
    columns: slice
    linear_term: Tensor | None
    offset: Tensor | None
    damping: Damping


class Pencil(ABC):
    """Path X(strength) of one block, for one or more displacements (`parts`) that add up to D.

    X is linear in D, so each part has its own share of it. Only some columns may move; D is zero in the others, which
    stay in place.
    """

    @abstractmethod
    def at(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength).

        Args:
            strength: Multiplier of the old curvature.

        Returns:
            One tensor per part, in the shape of the block.
        """

    @abstractmethod
    def quadratics(self, strength: float) -> tuple[float, float]:
        """Return 1/2 |X - D|^2_N and 1/2 |X|^2_O, both damped.

        Args:
            strength: Multiplier of the old curvature.

        Returns:
            The new quadratic, which increases along the path, and the old one, which decreases.
        """

    @abstractmethod
    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a low-rank approximation of `scale` times a part's share of X(strength).

        For the first part, the `offset` given to the constructor is subtracted before the approximation.

        The approximation is a truncated singular value decomposition in coordinates where the metric is the identity.
        The metric is the sum of both curvatures, each divided by the mean of its diagonal, or a Kronecker product
        that approximates that sum. Dense blocks are truncated in the Euclidean metric.

        Args:
            strength: Multiplier of the old curvature.
            part: Index of the part, from 0.
            rank: Rank of the approximation.
            scale: Multiplier of X.

        Returns:
            left (rows, rank) and right (rank, columns), whose product is the approximation.
        """


def damped(factor: Tensor, amount: float, *, is_diagonal: bool = False) -> Tensor:
    """Return M + amount mean(diag M) I.

    Args:
        factor: Matrices (..., n, n), or their diagonals (..., n).
        amount: Damping, relative to the mean of the diagonal.
        is_diagonal: Whether `factor` holds diagonals.

    Returns:
        The damped factor, in the same form.
    """
    entries = factor if is_diagonal else factor.diagonal(dim1=-2, dim2=-1)
    # Never exactly zero, so that a group that no example activates does not make the matrix singular.
    added = (amount * entries.mean(-1, keepdim=True)).clamp_min(SMALLEST).expand(entries.shape)
    return factor + (added if is_diagonal else torch.diag_embed(added))


SMALLEST = 1e-30
"""Minimum added to a diagonal."""

OVERSAMPLING, POWERS = 8, 4
"""Extra directions beyond the rank, and power iterations, of the randomized range finder."""


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute the best rank-`rank` approximation left @ right of a matrix, in float64.

    Each factor takes the square roots of the singular values. If the rank is small compared with the matrix, these are
    computed on the subspace found by a randomized range finder with power iterations (Halko, Martinsson and Tropp 2011,
    algorithm 4.4) and a fixed seed; otherwise on the whole matrix.

    Args:
        matrix: Matrix (rows, columns).
        rank: Rank of the approximation.

    Returns:
        left (rows, rank) and right (rank, columns).

    Examples:
        >>> matrix = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> left, right = truncated(matrix, 1)
        >>> (left @ right).round().abs()
        tensor([[2., 0., 0.],
                [0., 0., 0.]], dtype=torch.float64)
    """
    matrix = widened(matrix)
    if min(matrix.shape) > 4 * (rank + OVERSAMPLING):
        basis = leading_range(matrix, rank + OVERSAMPLING, POWERS)
        u, values, v = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
        u = basis @ u
    else:
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return u[:, :rank] * root, root.unsqueeze(-1) * v[:rank]


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)
