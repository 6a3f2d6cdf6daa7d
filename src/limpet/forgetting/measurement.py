"""Measure a task's loss curve (`limpet.forgetting.loss_curve`) at weights displaced as a new task would displace them.

The direction in which a new task will move the weights is unknown. It is modeled as isotropic noise, damped by the
precision L of the memory as in a proximal step:

    z = (I + s L)^-1 e,    e ~ N(0, 2 v I),

with v the mean square of a block's weights, so that e is as large as the difference between two independent sets of
such weights, and the step s chosen such that z is predicted to increase the loss by a given q. Averaging over z and -z
cancels the terms odd in z: at the mode of a penalized loss the gradient of the loss itself is not zero.

If the outputs have labels that do not occur in the task, the direction is known: the next task will use these labels.
Then

    z = t L^-1 g,    g = gradient of the log likelihood of labels that were never seen,

the direction in which a penalized loss moves from its mode. Along it the loss has a kink: outputs of labels that never
occurred are saturated, so at first the loss does not rise at all, and then in proportion to how far the task's own
labels are given up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.curvature import Fisher
from limpet.distributed import current
from limpet.forgetting.coherent import coherent_curve
from limpet.forgetting.loss_curve import Curve
from limpet.forgetting.loss_probe import LossProbe
from limpet.likelihoods import Likelihood
from limpet.model import Forward, preserve_state
from limpet.posterior import Posterior
from limpet.posterior.displacer import Displacer
from limpet.posterior.perturbation import BlockPerturbation, block_perturbations, by_parameter, displacer_of, numbered
from limpet.precision.linalg import bisected

RISES = (0.002, 0.006, 0.02, 0.06, 0.2)
"""The predicted increases, in nats per example, at which the true increase is measured."""

SHARE = 0.05
"""Cost of the measurement, as a fraction of the cost of the curvature pass."""

LEAST, SEQUENCES = 16, 4
"""Smallest number of examples to measure on; of predicted positions if there are several in a row, and then so many
rows at least, because the positions of a row are alike."""

DRIFT_PART, DRIFT_LEAST = 4, 64
"""The drift, which varies less between examples than the loss, is measured on one of 4, and on 64 at least."""


class Curves(NamedTuple):
    """The loss curves of a task.

    Attributes:
        loss: Increase of the loss along displacements as a protected task would take them.
        coherent: Drift along a coherent displacement (`limpet.forgetting.coherent`); None if it could not be measured.
    """

    loss: Curve = Curve()
    coherent: Curve | None = None


@torch.no_grad()
def measure(posterior: Posterior, fisher: Fisher, likelihood: Likelihood, forward: Forward | None, seed: int) -> Curves:
    """Measure the loss curves of a task whose Fisher has just been added to the posterior, at the current weights.

    Args:
        posterior: The posterior, with the task.
        fisher: The Fisher of the task. The measurement uses its stored first batches.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the Fisher was estimated with.
        seed: Seed of the random displacements and of sampled targets.

    Returns:
        The curves; empty if there is nothing to measure.
    """
    blocks = block_perturbations(posterior, fisher)
    displacer, ranks = displacer_of(posterior, blocks), current()
    # a backward pass costs as much as two forward passes
    rows = round(SHARE * fisher.rows * (1 + 2 * fisher.roots) / (2 * len(RISES) + 1))

    def probe_of(rows: int) -> LossProbe:
        share = rows if ranks is None else -(-rows // ranks.size)
        return LossProbe(posterior.model, fisher.first.take(share), likelihood, forward, seed)

    probe = probe_of(max(rows, needed_rows(LEAST, fisher)))
    if not displacer or not (probe.batches or ranks):
        return Curves()
    points = []
    with preserve_state(posterior.model):
        start = probe.loss({})
        if math.isnan(start):  # none of these examples has a target
            return Curves()
        gradient = probe.towards_unseen(displacer.names)
        if gradient is None:
            tasks = displacer.largest(max((held.tasks for held in posterior.held.values()), default=0))
            pushes = random_directions(blocks, displacer, round(fisher.examples * tasks), seed)
        else:
            pushes = along_gradient(blocks, displacer, displacer.gathered(gradient), fisher.examples)
        for pushed, rise in pushes:
            displacement = displacer.scattered(by_parameter(blocks, pushed))
            losses = [probe.loss(displacement)]
            if gradient is None:
                for z in displacement.values():  # in place, because a displacement is as large as the model
                    z.neg_()
                losses.append(probe.loss(displacement))
            del pushed, displacement  # before the next one is drawn
            points.append((rise / fisher.examples, fisher.loss_scale * (sum(losses) / len(losses) - start)))
        curve = Curve.through(points)
        if gradient is not None:  # the direction is known, and was measured
            return Curves(curve, curve)
        fewer = probe_of(max(rows // DRIFT_PART, needed_rows(DRIFT_LEAST, fisher)))
        return Curves(curve, coherent_curve(blocks, displacer, fewer, fisher.examples, fisher.loss_scale))


def needed_rows(examples: int, fisher: Fisher) -> int:
    """Return the number of rows that contain at least `examples` examples, or predicted positions.

    Args:
        examples: Number of examples.
        fisher: The Fisher of the task, which knows how many there are in a row.

    Returns:
        The number of rows; at least `SEQUENCES`, or `examples` if that is less.
    """
    return max(math.ceil(examples * fisher.rows / max(fisher.seen, 1)), min(examples, SEQUENCES))


Push = tuple[list[Tensor], float]
"""A displacement of every block, and the predicted increase of the loss, summed over examples."""


def random_directions(
    blocks: Sequence[BlockPerturbation], displacer: Displacer, examples: int, seed: int
) -> Iterator[Push]:
    """Draw a random displacement for every predicted increase in `RISES`.

    Args:
        blocks: The blocks to displace.
        displacer: Sums over the blocks of all ranks.
        examples: Number of examples that the Fisher of all tasks sums over.
        seed: Seed of the noise.

    Yields:
        The displacement for one predicted increase, by block, and what it is predicted to increase the loss by.
    """
    expected = expected_rise(blocks, displacer)
    for number, rise in enumerate(RISES):
        step = step_for_rise(expected, rise * examples)
        yield _pushed(blocks, displacer, step, seed, number)  # no reference is kept while the next one is drawn
        if not step:
            break  # the noise is undamped already: larger increases are out of reach


def _pushed(blocks: Sequence[BlockPerturbation], displacer: Displacer, step: float, seed: int, number: int) -> Push:
    """Push every block of this process; the increase is that of all ranks."""
    drawn = [block.push(step, numbered(seed, number, block.block)) for block in blocks]
    return [z for z, _ in drawn], displacer.total(sum(rise for _, rise in drawn))


def along_gradient(
    blocks: Sequence[BlockPerturbation], displacer: Displacer, gradient: Mapping[str, Tensor], examples: int
) -> Iterator[Push]:
    """Scale the direction L^-1 gradient to every predicted increase in `RISES`.

    Args:
        blocks: The blocks to displace.
        displacer: Sums over the blocks of all ranks.
        gradient: The gradient to follow, by parameter name.
        examples: Number of examples of the task.

    Yields:
        The displacement for one predicted increase, by block, and that increase.
    """
    direction = [block.followed(gradient) for block in blocks]
    predicted = displacer.total(sum(block.rise(z) for block, z in zip(blocks, direction, strict=True))) / examples
    if predicted > 0 and math.isfinite(predicted):
        for rise in RISES:
            yield [math.sqrt(rise / predicted) * z for z in direction], rise * examples


def expected_rise(blocks: Sequence[BlockPerturbation], displacer: Displacer) -> Callable[[float], float]:
    """Return the expected increase of the loss by damped noise, as a function of the step s.

    It goes through all eigenvalues, so values are cached: bisections for several increases evaluate it at the same
    steps, before they part.

    Args:
        blocks: The blocks to displace.
        displacer: Sums over the blocks of all ranks.

    Returns:
        The function; its values are summed over examples.
    """

    @functools.cache
    def expected(step: float) -> float:
        return displacer.total(sum(2 * block.square * block.spectrum.expected_rise(step) for block in blocks))

    return expected


def step_for_rise(expected: Callable[[float], float], rise: float) -> float:
    """Find the step s at which noise is expected to increase the loss of all tasks by a given amount.

    Args:
        expected: The expected increase as a function of the step (`expected_rise`).
        rise: The expected increase, summed over examples.

    Returns:
        The step; 0 if even undamped noise increases the loss by less.
    """
    if expected(0.0) <= rise:
        return 0.0
    return bisected(lambda step: expected(step) > rise, furthest=30.0, close=0.2)[1]
