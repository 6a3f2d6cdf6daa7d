"""A precision and its Fisher in one basis, where everything along the way of the proximal map is elementwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from limpet.precision.linalg import widened


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues: `fisher` of the sum of F_t, `total` of the sum of strength_t F_t, and the prior beside them.

    `into` takes a block (or many, in leading dimensions) to the basis and `back` takes it back. With every strength
    multiplied by `factor`, the proximal map divides by 1 + step (prior + factor total).
    """

    fisher: Tensor
    total: Tensor
    prior: float
    into: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def proximal_denominator(self, step: float, factor: float = 1.0) -> Tensor:
        """What the proximal map divides by, in the basis: 1 + step (prior + factor total)."""
        return 1 + step * self.prior + (step * factor) * self.total

    def rise(self, coordinates: Tensor, step: float, factor: float = 1.0) -> float:
        """1/2 w^T F w for the w that the proximal map makes of what has these coordinates in the basis."""
        return float((self.fisher * (coordinates / self.proximal_denominator(step, factor)).square()).sum()) / 2

    def expected_rise(self, step: float) -> float:
        """The mean of `rise` over noise of unit size: 1/2 tr(P F P) with P = (I + step L)^-1."""
        return float((widened(self.fisher) / widened(self.proximal_denominator(step)).square()).sum()) / 2
