"""The path X(strength) between two diagonal curvatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limpet.precision.diagonal import Diagonal
from limpet.precision.linalg import widened
from limpet.precision.pencil import MovedBlock, Pencil, damped, sum_of, truncated
from limpet.precision.terms import DiagonalTerm, Term


class DiagonalPencil(Pencil):
    """Path between two diagonal curvatures: X = (n D - strength linear_term) / (n + strength o), elementwise.

    Args:
        old: Precision of the block. Only its Fisher is used.
        new: Fisher of the block on the new data.
        moved: How training has moved the block.
    """

    def __init__(self, old: Diagonal, new: Sequence[Term], moved: MovedBlock) -> None:
        self.like, self.parts = moved.parts[0], [widened(part) for part in moved.parts]
        self.offset = None if moved.offset is None else widened(moved.offset)
        n = torch.stack([widened(term.diagonal) for term in new if isinstance(term, DiagonalTerm)]).sum(0)
        o = widened(old.fisher().values.plain)
        self.new, self.old = (
            damped(values.flatten(), amount, is_diagonal=True).reshape(values.shape)
            for values, amount in ((n, moved.damping.new), (o, moved.damping.old))
        )
        self.linear_term = None
        if moved.linear_term is not None:
            linear_term = widened(moved.linear_term)[..., moved.columns]
            self.linear_term = torch.zeros_like(self.parts[0])
            self.linear_term[..., moved.columns] = linear_term / len(self.parts)

    def _solved(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength), in float64."""
        pull = 0 if self.linear_term is None else strength * self.linear_term
        return [(self.new * part - pull) / (self.new + strength * self.old) for part in self.parts]

    def at(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength), in the shape of the block."""
        return [x.to(self.like) for x in self._solved(strength)]

    def quadratics(self, strength: float) -> tuple[float, float]:
        """Return 1/2 |X - D|^2_N and 1/2 |X|^2_O, both damped."""
        x, d = sum_of(self._solved(strength)), sum_of(self.parts)
        return float((self.new * (x - d).square()).sum()) / 2, float((self.old * x.square()).sum()) / 2

    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a low-rank approximation of a part's share, in a separable metric close to both curvatures."""
        metric = self.new / self.new.mean() + self.old / self.old.mean()
        rows, columns = metric.mean(-1).sqrt(), (metric.mean(-2) / metric.mean()).sqrt()
        x = scale * self._solved(strength)[part] - (0 if part or self.offset is None else self.offset)
        left, right = truncated(rows.unsqueeze(-1) * x * columns, rank)
        return (left / rows.unsqueeze(-1)).to(self.like), (right / columns).to(self.like)
