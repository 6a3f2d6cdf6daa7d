"""How much may be forgotten, said instead of a strength.

The penalty is 1/2 (w - mean)^T (prior + m sum of F_t) (w - mean) / N, and m is the multiplier of the constraint that
the forecast stays within the budget: as large as that takes, and zero while the weights are within it anyway.

A proximal map knows how q = 1/2 (w - mean)^T F (w - mean) falls with m before anything moves, so it solves for m in
every map: nothing to tune, and the last map ends within the budget. A gradient does not know it: then m follows
log m += rate * log(q / budget), dual ascent on the logarithm, with a part in proportion so that it does not swing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from limpet.forgetting.loss_curve import TaskHistory
from limpet.precision.linalg import bisected

CLOSE = 1e-3
"""How near, relatively, the multiplier is solved for."""

RATE, PROPORTION = 0.05, 1.0
FURTHEST = 30.0
"""The largest |log m|."""


class Budget:
    """The least multiplier with which the forecast stays within the budget, in nats per example."""

    def __init__(self, history: TaskHistory, budget: float) -> None:
        self.quadratic = _inverse(lambda q: history.mean(history.rises(q)), budget) if history.tasks else math.inf
        self.state = 0.0  # log m without its part in proportion; kept with the memory

    def solve(self, q: Callable[[float], float]) -> float:
        """The m with q(m), which falls with m, at the budget; 0 where q(0) is within it."""
        if q(0.0) <= self.quadratic:
            return 0.0
        return bisected(lambda m: q(m) > self.quadratic, furthest=FURTHEST, close=CLOSE)[1]

    def follow(self, q: float) -> float:
        """The m of the next step, after one at which q was found."""
        off = math.log(max(q, 1e-300) / self.quadratic) if self.quadratic < math.inf else -FURTHEST
        off = min(max(off, -3.0), 3.0)
        self.state = min(max(self.state + RATE * off, -FURTHEST), FURTHEST)
        return math.exp(self.state + PROPORTION * off)


def _inverse(function: Callable[[float], float], value: float) -> float:
    """Where a function that rises from 0 has a value."""
    return bisected(lambda q: function(q) < value, furthest=60.0, close=1e-6)[0]
