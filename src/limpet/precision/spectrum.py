"""A precision and its Fisher in one basis, in which the proximal step is elementwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from limpet.precision.linalg import widened


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a precision and of its Fisher in a common basis.

    With every strength multiplied by `factor`, the proximal step divides by 1 + step (prior + factor total).

    Args:
        fisher_values: Eigenvalues of the sum of F_t. A truncated precision has few, each of which occurs often.
        total_values: Eigenvalues of the sum of strength_t F_t, likewise.
        prior: Prior precision, not included in `total`.
        into: Maps a block (or several, along leading dimensions) into the basis.
        back: Maps coordinates in the basis back to a block.
        spread: Repeats few eigenvalues as often as they occur. None if there is one for every weight.
        counts: How often each of them occurs.
    """

    fisher_values: Tensor
    total_values: Tensor
    prior: float
    into: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor] | None = None
    counts: Tensor | None = None

    @property
    def fisher(self) -> Tensor:
        """Eigenvalues of the sum of F_t, in the shape of the block."""
        return self.fisher_values if self.spread is None else self.spread(self.fisher_values)

    @property
    def total(self) -> Tensor:
        """Eigenvalues of the sum of strength_t F_t, in the shape of the block."""
        return self.total_values if self.spread is None else self.spread(self.total_values)

    def proximal_denominator(self, step: float, factor: float = 1.0) -> Tensor:
        """Return what the proximal step divides by in the basis: 1 + step (prior + factor total).

        Args:
            step: Step size.
            factor: Multiplier of every strength.

        Returns:
            The denominator, in the shape of the eigenvalues.
        """
        return 1 + step * self.prior + (step * factor) * self.total

    def rise(self, coordinates: Tensor, step: float, factor: float = 1.0) -> float:
        """Return the quadratic increase 1/2 w^T F w at the result w of a proximal step.

        Args:
            coordinates: Starting point of the proximal step, in the basis.
            step: Step size.
            factor: Multiplier of every strength.

        Returns:
            The increase.
        """
        return float((self.fisher * (coordinates / self.proximal_denominator(step, factor)).square()).sum()) / 2

    def expected_rise(self, step: float) -> float:
        """Return the expected `rise` for standard normal coordinates: 1/2 tr(P F P) with P = (I + step L)^-1.

        Args:
            step: Step size.

        Returns:
            The expected increase.
        """
        denominator = (step * widened(self.total_values)).add_(1 + step * self.prior).square_()
        found = widened(self.fisher_values) / denominator
        return float((found if self.counts is None else found * widened(self.counts)).sum()) / 2
