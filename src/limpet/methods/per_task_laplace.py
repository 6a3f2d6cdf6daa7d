"""Per-task Laplace: one quadratic penalty around the mode of each task. With structure="diagonal" it is EWC."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from limpet.curvature import Fisher
from limpet.methods.laplace import Laplace
from limpet.posterior import BlockPosterior
from limpet.precision.linalg import widened


class PerTaskLaplace(Laplace):
    """Laplace approximation with a separate quadratic penalty for every task.

        penalty(w) = sum_t 1/2 strength (w - mean_t)^T F_t (w - mean_t)

    with the prior added to the first task's term. The sum of these quadratics is again a quadratic. Around the newest
    mean m it has the precision L = sum of all F_t, the linear term (slope) sum F_t (m - mean_t) and a constant, and
    all three are updated recursively. With d = new mean - old mean,

        slope' = slope + L d,    constant' = constant + slope^T d + 1/2 d^T L d,    L' = L + strength F

    so only the newest mean is stored, and the size of the diagonal structure does not grow with the number of tasks.
    Elastic weight consolidation (EWC, Kirkpatrick et al. 2017) is `structure="diagonal"`. With a budget, the slope is
    not applied, because the forecast is measured from the newest mean (`limpet.forgetting.budget`). The constructor
    arguments are those of `limpet.methods.laplace.Laplace`.

    Examples:
        >>> import torch, limpet
        >>> model = torch.nn.Linear(3, 2)
        >>> ewc = limpet.PerTaskLaplace(model, structure="diagonal", strength=100.0)
        >>> ewc.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
        >>> ewc.penalty().item()
        0.0
    """

    method = "per-task-laplace"

    def _update(self, fishers: list[Fisher]) -> None:
        self._moved = 0.0
        super()._update(fishers)
        sharding = self.posterior.sharding
        self.posterior.constant += self._moved if sharding is None else sharding.ranks.numbers(self._moved)[0]

    def _updated(self, held: BlockPosterior, fishers: list[Fisher], mean: Tensor) -> BlockPosterior:
        linear_term = None
        if held.tasks:
            d = widened(mean - held.mean)
            precision = held.precision.to(d.device, torch.float64)
            gradient = precision.apply(d)
            old = torch.zeros_like(d) if held.linear_term is None else widened(held.linear_term)
            self._moved += float((old * d).sum() + (d * gradient).sum() / 2)
            linear_term = (old + gradient).to(held.mean)
        return replace(
            held, mean=mean, linear_term=linear_term, precision=self._added(held, fishers), tasks=held.tasks + 1
        )
