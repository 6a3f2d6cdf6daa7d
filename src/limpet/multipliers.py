"""What the strength is multiplied by while a task is learned, where it follows what would be forgotten.

The penalty of a memory is 1/2 (w - mean)^T (prior + m sum of F_t) (w - mean) / N. With a fixed strength m is 1. Here it
is a function of the q that the weights are at, 1/2 (w - mean)^T F (w - mean) over the old examples:

- `Automatic`: m = R'(q), with R the measured rise of the old loss (`limpet.calibration`): the penalty is then that rise
  itself, N_old R(q), instead of its quadratic.
- `Budget`: m is as large as keeps the forecast at the budget, and zero below it: the multiplier of a constraint.

A proximal map knows how q falls with m, so it solves for m and needs no memory of earlier steps. A gradient does not: a
budget then follows log m += rate * log(forecast / budget), dual ascent on the logarithm, with a part in proportion so
that it does not swing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from limpet.calibration import History

CLOSE = 1e-3
"""How near, relatively, a multiplier is solved for."""


class Multiplier(Protocol):
    """What decides the multiplier."""

    state: float
    """What is carried from step to step; kept with the memory."""

    binding: bool
    """Whether training must end where the multiplier would be zero, or just not."""

    def solve(self, q: Callable[[float], float]) -> float:
        """The multiplier, where q(m), which falls with m, is known."""

    def follow(self, q: float) -> float:
        """The multiplier at a q, for a gradient."""


class Automatic:
    """m = R'(q), the mean over all tasks known."""

    state, binding = 1.0, False

    def __init__(self, history: History) -> None:
        self.history = history

    def solve(self, q: Callable[[float], float]) -> float:
        """The one m with m = R'(q(m))."""
        low, high = self.history.slope(0.0), self.history.slope(q(0.0))
        low, high = min(low, high), max(low, high)
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.history.slope(q(middle)) > middle else (low, middle)
        return high

    def follow(self, q: float) -> float:
        """R'(q)."""
        return self.history.slope(q)


class Budget:
    """The least m with which the forecast stays within the budget."""

    binding = True
    RATE, PROPORTION = 0.05, 1.0
    LIMIT = 30.0  # of |log m|

    def __init__(self, history: History, budget: float) -> None:
        self.budget, self.state = budget, 0.0
        self.quadratic = _inverse(lambda q: history.mean(history.rises(q)), budget) if history.tasks else math.inf

    def solve(self, q: Callable[[float], float]) -> float:
        """The m with q(m) at the budget, from below; 0 where q is within it anyway."""
        if q(0.0) <= self.quadratic:
            return 0.0
        low, high = -self.LIMIT, self.LIMIT
        while high - low > CLOSE:
            middle = (low + high) / 2
            low, high = (middle, high) if q(math.exp(middle)) > self.quadratic else (low, middle)
        return math.exp(high)

    def follow(self, q: float) -> float:
        """One step of dual ascent."""
        off = math.log(max(q, 1e-300) / self.quadratic) if self.quadratic < math.inf else -self.LIMIT
        off = min(max(off, -3.0), 3.0)
        self.state = min(max(self.state + self.RATE * off, -self.LIMIT), self.LIMIT)
        return math.exp(self.state + self.PROPORTION * off)


def _inverse(function: Callable[[float], float], value: float) -> float:
    """Where a function that rises from 0 has a value."""
    low, high = -60.0, 30.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if function(math.exp(middle)) < value else (low, middle)
    return math.exp(low)
