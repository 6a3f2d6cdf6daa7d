"""Foretell forgetting: how much the old loss has risen since the last consolidation, by what the memory knows.

    rise = 1/2 (w - mean)^T F (w - mean) / N

with F the Fisher of all tasks seen, unweighted by any strength and without the prior, and N all their examples. It
is the second-order Taylor expansion of the mean old loss around the mean, where its gradient is taken as zero.
"""

from __future__ import annotations

import torch

from limpet.posterior import Posterior


class Forecast(float):
    """The predicted rise of the mean loss on the old data, in nats per example; `blocks` has each block's share."""

    blocks: dict[str, float]

    def __new__(cls, blocks: dict[str, float]) -> Forecast:
        """The sum over the blocks."""
        forecast = super().__new__(cls, sum(blocks.values()))
        forecast.blocks = blocks
        return forecast

    def __str__(self) -> str:
        worst = sorted(self.blocks.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {value:.4g}" for name, value in worst if value > 0)
        return f"{float(self):.4g} nats per example" + (f" (most in {named})" if named else "")


@torch.no_grad()
def forecast(posterior: Posterior, examples: int) -> Forecast:
    """The forecast for the weights as they are now, against a memory of so many examples."""
    weights = posterior.weights()
    rises = dict.fromkeys(posterior.held, 0.0)
    for name, held in posterior.held.items():
        if held.tasks and examples:
            rises[name] = float(held.precision.fisher().quadratic(held.displacement(weights))) / (2 * examples)
    return Forecast(rises)
