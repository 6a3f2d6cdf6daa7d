"""The path X(strength) between two dense curvatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limpet.precision.dense import Dense
from limpet.precision.linalg import generalised_eigen, widened
from limpet.precision.pencil import MovedBlock, Pencil, damped, sum_of, truncated
from limpet.precision.terms import DenseTerm, Term


class DensePencil(Pencil):
    """Path between two dense curvatures: one generalized eigenproblem over the columns that moved.

    Args:
        old: Precision of the block. Only its Fisher is used.
        new: Fisher of the block on the new data.
        moved: How training has moved the block.
    """

    def __init__(self, old: Dense, new: Sequence[Term], moved: MovedBlock) -> None:
        self.like, self.shape = moved.parts[0], moved.parts[0].shape
        self.offset = None if moved.offset is None else widened(moved.offset)
        self.index = (
            torch.arange(self.shape.numel(), device=self.like.device).reshape(self.shape)[..., moved.columns].flatten()
        )
        n = torch.stack([widened(term.matrix) for term in new if isinstance(term, DenseTerm)]).sum(0)
        o = widened(old.fisher().matrix.plain)
        n, o = (matrix[self.index.unsqueeze(1), self.index] for matrix in (n, o))
        self.vectors, dual, self.values = generalised_eigen(damped(n, moved.damping.new), damped(o, moved.damping.old))
        self.coordinates = [dual.mT @ self._flat(part) for part in moved.parts]
        linear_term = None if moved.linear_term is None else self._flat(moved.linear_term) / len(moved.parts)
        self.pull = None if linear_term is None else self.vectors.mT @ linear_term

    def _flat(self, part: Tensor) -> Tensor:
        """Return the moved columns of a part as a vector, in float64."""
        return widened(part).flatten()[self.index]

    def _solved(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength) in generalized eigencoordinates."""
        pull = 0 if self.pull is None else strength * self.pull
        return [(c - pull) / (1 + strength * self.values) for c in self.coordinates]

    def _block(self, coordinates: Tensor) -> Tensor:
        """Map generalized eigencoordinates back to the shape of the block."""
        block = torch.zeros(self.shape.numel(), dtype=coordinates.dtype, device=coordinates.device)
        block[self.index] = self.vectors @ coordinates
        return block.reshape(self.shape)

    def at(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength), in the shape of the block."""
        return [self._block(x).to(self.like) for x in self._solved(strength)]

    def quadratics(self, strength: float) -> tuple[float, float]:
        """Return 1/2 |X - D|^2_N and 1/2 |X|^2_O, both damped."""
        x, c = sum_of(self._solved(strength)), sum_of(self.coordinates)
        return float((x - c).square().sum()) / 2, float((self.values * x.square()).sum()) / 2

    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a low-rank approximation of a part's share of X(strength), in the Euclidean metric."""
        x = scale * self._block(self._solved(strength)[part]) - (0 if part or self.offset is None else self.offset)
        left, right = truncated(x, rank)
        return left.to(self.like), right.to(self.like)
