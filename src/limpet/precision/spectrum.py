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
        fisher: Eigenvalues of the sum of F_t.
        total: Eigenvalues of the sum of strength_t F_t.
        prior: Prior precision, not included in `total`.
        into: Maps a block (or several, along leading dimensions) into the basis.
        back: Maps coordinates in the basis back to a block.
        distinct: The same eigenvalues without repetitions (of the Fisher, in total, and how often each occurs), if the
            precision is truncated and has few.
    """

    fisher: Tensor
    total: Tensor
    prior: float
    into: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    distinct: tuple[Tensor, Tensor, Tensor] | None = None

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
        if self.distinct is None:
            return float((widened(self.fisher) / widened(self.proximal_denominator(step)).square()).sum()) / 2
        fisher, total, counts = map(widened, self.distinct)
        return float((counts * fisher / (1 + step * self.prior + step * total).square()).sum()) / 2
