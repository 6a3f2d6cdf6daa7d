"""Forecast forgetting: predict from the memory how much the old loss has risen since the last consolidation.

    q = 1/2 (w - mean)^T F (w - mean) / N,    rise = mean over the tasks of R_t(q_t + q) - R_t(q_t)

with F the Fisher of all tasks seen, without strengths and without the prior, and N the number of all their examples: q
is the second-order Taylor expansion of the mean old loss around the mean, where its gradient is assumed to be zero. R_t
is the loss curve of task t, measured when the task was consolidated, and q_t the sum of the q of all tasks consolidated
since then (`limpet.forgetting.loss_curve`). A second curve, of the drift along coherent displacements, shows whether
the quadratic describes the network at all (`limpet.forgetting.coherent`). Where it does not, the forecast is the higher
of the two curves, and `trusted` is False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from limpet.curvature import FisherPass
from limpet.forgetting.loss_curve import TaskHistory
from limpet.forgetting.loss_probe import LossProbe
from limpet.model import named_parameters, perturbed, preserve_state
from limpet.posterior import Posterior
from limpet.posterior.displacer import Displacer


class Forecast(float):
    """Predicted increase of the mean loss on the old data, in nats per example (or predicted token).

    Attributes:
        quadratic: Prediction of the second-order expansion alone.
        blocks: Contribution of each block to the increase, by name.
        tasks: Predicted increase for each task, oldest first.
        drift: Predicted KL(before || now), in nats per example; None if its curve was not measured. Unlike the loss,
            which may also fall, it increases in every direction.
        doubt: Why the forecast cannot be trusted; None if it can.
    """

    quadratic: float
    drift: float | None
    blocks: dict[str, float]
    tasks: list[float]
    doubt: str | None

    def __new__(
        cls,
        rise: float,
        quadratics: dict[str, float],
        tasks: list[float],
        drift: float | None = None,
        doubt: str | None = None,
    ) -> Forecast:
        """Divide the increase among the blocks in proportion to their quadratics.

        Args:
            rise: The predicted increase.
            quadratics: The quadratic prediction of each block, by name. Blocks contribute to the increase in
                proportion to it.
            tasks: The predicted increase for each task, oldest first.
            drift: The predicted drift.
            doubt: Why the forecast cannot be trusted.
        """
        q = sum(quadratics.values())
        forecast = super().__new__(cls, rise)
        forecast.quadratic, forecast.tasks, forecast.drift, forecast.doubt = q, tasks, drift, doubt
        forecast.blocks = {name: part * rise / q if q else 0.0 for name, part in quadratics.items()}
        return forecast

    @property
    def trusted(self) -> bool:
        """Whether the displacement is within what was measured, in a network that the curvature describes."""
        return self.doubt is None

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Support copy and pickle, which restore the attributes afterwards."""
        return float(self), {}, []

    def __str__(self) -> str:
        worst = sorted(self.blocks.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {value:.4g}" for name, value in worst if value > 0)
        doubt = f"; not to be trusted: {self.doubt}" if self.doubt else ""
        return f"{float(self):.4g} nats per example" + (f" (most in {named})" if named else "") + doubt


@torch.no_grad()
def forecast(posterior: Posterior, examples: int, history: TaskHistory) -> Forecast:
    """Predict the increase of the old loss at the current weights.

    Args:
        posterior: The posterior of the memory.
        examples: Number of examples consolidated so far; with 0 the forecast is zero.
        history: The loss curves of the consolidated tasks. Without any, the forecast is the quadratic.

    Returns:
        The forecast, with the contribution of every block and task.
    """
    quadratics = dict.fromkeys(posterior.names, 0.0)
    for name, rise in posterior.rises().items() if examples else ():
        quadratics[name] = rise / examples
    q = sum(quadratics.values())
    tasks = history.rises(q)
    return Forecast(history.mean(tasks) if tasks else q, quadratics, tasks, history.drift(q), history.doubt(q))


def fresh_forecast(posterior: Posterior, one_pass: FisherPass, batches: Iterable[Any]) -> Forecast:
    """Measure the increase of the loss on old data that are still available, instead of predicting it.

    The increase is that of the measured loss from the mean to the current weights. Blocks contribute in proportion to
    the quadratic of the Fisher of these data, estimated at the mean. The weights are moved to the mean temporarily.

    Args:
        posterior: The posterior of the memory.
        one_pass: The Fisher pass to run over the batches.
        batches: Batches of old data.

    Returns:
        The forecast, with the contribution of every block. Its `tasks` is empty.
    """
    data, own = list(batches), posterior.way_to_the_mean()
    way = Displacer(posterior, own).scattered(own)
    with perturbed(named_parameters(posterior.model), way):
        fisher = one_pass.run(data, progress=False)
    probe = LossProbe(posterior.model, data, one_pass.likelihood, one_pass.forward, one_pass.seed)
    with preserve_state(posterior.model):
        before = probe.loss(way)
        rise = fisher.loss_scale * (probe.loss({}) - before)
    weights, quadratics = posterior.weights(), dict.fromkeys(posterior.held, 0.0)
    with torch.no_grad():
        for name, held in posterior.held.items():
            d = held.displacement(weights)
            terms = fisher.terms.get(name, ())
            quadratics[name] = sum(float((d * term.apply(d)).sum()) for term in terms) / (2 * fisher.examples)
    if posterior.sharding is not None:
        quadratics = {name: q for some in posterior.sharding.ranks.gather(quadratics) for name, q in some.items()}
    return Forecast(rise, quadratics, [])
