"""Forgetting budgets: limit the forecast of forgetting instead of choosing a strength.

The constraint is forecast(w) <= budget, and the forecast is an increasing function of q = 1/2 d^T F d, where d is
w - mean and F the sum of the F_t (`limpet.forgetting.forecast`). With the prior, the Lagrangian is

    mean loss + 1/2 d^T (prior + m F) d / N,

and its multiplier m is as large as necessary, and zero while the constraint is inactive. A budget replaces the
strengths: the F_t are not weighted by them, so it holds even if all of them are zero. Methods with one mean per task
have a linear term in their penalty (`limpet.PerTaskLaplace`), which is not part of it: the forecast is measured from
the newest mean, so with a budget that mean is the minimum of the penalty for every m. Multiplied by m, the linear term
would drag the weights to the minimum of the sum of the tasks' penalties instead, where the forecast may exceed the
budget for every m.

In proximal mode, q after the step is a known function of m, so every proximal step
solves for m: there is nothing to tune, and training ends within the budget. In gradient mode it is not known, and m
follows log m += rate * log(q / budget), dual ascent on the logarithm, plus a proportional term that damps oscillation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from limpet.forgetting.loss_curve import TaskHistory
from limpet.precision.linalg import bisected

CLOSE = 1e-3
"""Relative tolerance of the multiplier."""

RATE, PROPORTION = 0.05, 1.0
"""Gains of the integral and proportional terms in gradient mode."""

FURTHEST = 30.0
"""Largest |log m|."""


class Budget:
    """Find the smallest multiplier that keeps the forecast within a budget.

    Args:
        history: The loss curves of the consolidated tasks. Without any, every forecast is within the budget.
        budget: The allowed increase of the mean old loss, in nats per example.

    Attributes:
        quadratic: The budget in terms of the quadratic q, in nats per example.
        state: log m without its proportional term; stored with the memory.
    """

    def __init__(self, history: TaskHistory, budget: float) -> None:
        self.quadratic = _inverse(lambda q: history.mean(history.rises(q)), budget) if history.tasks else math.inf
        self.state = 0.0

    def solve(self, q: Callable[[float], float]) -> float:
        """Solve for the multiplier in proximal mode.

        Args:
            q: The quadratic after the proximal step as a decreasing function of the multiplier.

        Returns:
            The multiplier m at which q(m) equals the budget; 0 if q(0) is within it.
        """
        if q(0.0) <= self.quadratic:
            return 0.0
        return bisected(lambda m: q(m) > self.quadratic, furthest=FURTHEST, close=CLOSE)[1]

    def follow(self, q: float) -> float:
        """Update the multiplier in gradient mode.

        Args:
            q: The quadratic at the current weights.

        Returns:
            The multiplier of the next step.
        """
        off = math.log(max(q, 1e-300) / self.quadratic) if self.quadratic < math.inf else -FURTHEST
        off = min(max(off, -3.0), 3.0)
        self.state = min(max(self.state + RATE * off, -FURTHEST), FURTHEST)
        return math.exp(self.state + PROPORTION * off)


def _inverse(function: Callable[[float], float], value: float) -> float:
    """Invert an increasing function that is 0 at 0."""
    return bisected(lambda q: function(q) < value, furthest=60.0, close=1e-6)[0]
