"""Foretell forgetting: how much the old loss has risen since the last consolidation, by what the memory knows.

    q = 1/2 (w - mean)^T F (w - mean) / N,    rise = mean over the tasks of R_t(q_t + q) - R_t(q_t)

with F the Fisher of all tasks seen, unweighted by any strength and without the prior, and N all their examples: q is
the second-order Taylor expansion of the mean old loss around the mean, where its gradient is taken as zero. R_t is the
task's curve, measured when it was taken in, and q_t the way behind it since then (`limpet.forgetting.loss_curve`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from limpet.curvature import FisherPass
from limpet.forgetting.loss_curve import TaskHistory
from limpet.forgetting.measurement import LossProbe
from limpet.model import named_parameters, perturbed, preserve_state
from limpet.posterior import Posterior


class Forecast(float):
    """The predicted rise of the mean loss on the old data, in nats per example (or predicted token).

    `tasks` has that of each task, oldest first, `blocks` each block's share of the whole, and `quadratic` what the
    second-order expansion alone would say.
    """

    quadratic: float
    blocks: dict[str, float]
    tasks: list[float]

    def __new__(cls, rise: float, quadratics: dict[str, float], tasks: list[float]) -> Forecast:
        """A rise of which each block has the share that it has of the quadratic."""
        q = sum(quadratics.values())
        forecast = super().__new__(cls, rise)
        forecast.quadratic, forecast.tasks = q, tasks
        forecast.blocks = {name: part * rise / q if q else 0.0 for name, part in quadratics.items()}
        return forecast

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies: the attributes come after it, as they are."""
        return float(self), {}, []

    def __str__(self) -> str:
        worst = sorted(self.blocks.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {value:.4g}" for name, value in worst if value > 0)
        return f"{float(self):.4g} nats per example" + (f" (most in {named})" if named else "")


@torch.no_grad()
def forecast(posterior: Posterior, examples: int, history: TaskHistory) -> Forecast:
    """The forecast for the weights as they are now, against a memory of so many examples."""
    quadratics = dict.fromkeys(posterior.names, 0.0)
    for name, rise in posterior.rises().items() if examples else ():
        quadratics[name] = rise / examples
    q = sum(quadratics.values())
    tasks = history.rises(q)
    return Forecast(history.mean(tasks) if tasks else q, quadratics, tasks)


def fresh_forecast(posterior: Posterior, one_pass: FisherPass, batches: Iterable[Any]) -> Forecast:
    """The same from some old data in hand: the rise is that of their loss, the blocks' shares those of their Fisher.

    Both are measured with the mean as the start, to which the weights are put for as long.
    """
    data, way = list(batches), posterior.way_to_the_mean()
    with perturbed(named_parameters(posterior.model), way):
        fisher = one_pass.run(data, progress=False)
    look = LossProbe(posterior.model, data, one_pass.likelihood, one_pass.forward, one_pass.seed)
    with preserve_state(posterior.model):
        before = look.loss(way)
        rise = fisher.loss_scale * (look.loss({}) - before)
    weights, quadratics = posterior.weights(), dict.fromkeys(posterior.held, 0.0)
    with torch.no_grad():
        for name, held in posterior.held.items():
            d = held.displacement(weights)
            terms = fisher.terms.get(name, ())
            quadratics[name] = sum(float((d * term.apply(d)).sum()) for term in terms) / (2 * fisher.examples)
    return Forecast(rise, quadratics, [])
