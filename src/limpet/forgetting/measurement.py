"""Measure a task's loss curve (`limpet.forgetting.loss_curve`) at weights displaced as a new task would displace them.

Nobody knows where a new task will push. It pulls in all directions alike, and the memory holds against it:

    z = (I + s L)^-1 e,    e ~ N(0, 2 v I),

with v the mean square of a block's weights, so that e leads from them to other weights of their size, and s, by which
the memory holds, such that z is predicted to raise the loss by a stated q. The mean of z and -z leaves out what is odd
in z: at the mode of a penalised loss the gradient is not zero.

But where the outputs have labels that the task never had, it is known: the next task will have them. Then

    z = t L^-1 g,    g = gradient of the log likelihood of labels that were never seen,

the direction in which a penalised loss moves from its mode. It leads to a wall: outputs that were never wanted are
saturated, so the loss does not rise at all, and then by as much as the labels are given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature import Fisher
from limpet.distributed import current
from limpet.forgetting.loss_curve import Curve
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, named_parameters, perturbed, prepared, preserve_state, trainable
from limpet.posterior import Posterior
from limpet.posterior.perturbation import BlockPerturbation, by_parameter, numbered, places
from limpet.precision.linalg import bisected

RISES = (0.002, 0.006, 0.02, 0.06, 0.2)
"""The predicted rises, in nats per example, at which the true one is measured."""

SHARE = 0.05
"""The work of measuring, as a share of that of the curvature pass."""

LEAST = 16
"""Examples that are looked at however few the pass took."""

SURE = 20
"""A label is missing for a reason, not by chance, where there would have been so many of each."""


@torch.no_grad()
def measure(posterior: Posterior, fisher: Fisher, likelihood: Likelihood, forward: Forward | None, seed: int) -> Curve:
    """The curve of a task whose Fisher has just been added to the posterior, at the weights as they are."""
    blocks = places(posterior, fisher)
    ranks = current()
    # a backward pass costs two forward ones
    rows = round(SHARE * fisher.rows * (1 + 2 * fisher.roots) / (2 * len(RISES) + 1))
    share = max(rows, LEAST) if ranks is None else -(-max(rows, LEAST) // ranks.size)
    look = LossProbe(posterior.model, fisher.first.take(share), likelihood, forward, seed)
    if not blocks or not (look.batches or ranks):
        return Curve()
    points = []
    with preserve_state(posterior.model):
        start = look.loss({})
        if math.isnan(start):  # not one of these examples has a target
            return Curve()
        gradient = look.towards_unseen([name for block in blocks for name in block.block.parameters])
        if gradient is None:
            tasks = max(held.tasks for held in posterior.held.values())
            pushes = random_directions(blocks, fisher.examples * tasks, seed)
        else:
            pushes = along_gradient(blocks, gradient, fisher.examples)
        for displacements in pushes:
            predicted = sum(block.rise(z) for block, z in zip(blocks, displacements[0], strict=True)) / fisher.examples
            losses = [look.loss(by_parameter(blocks, z)) for z in displacements]
            points.append((predicted, fisher.loss_scale * (sum(losses) / len(losses) - start)))
    return Curve.through(points)


Displacements = list[list[Tensor]]
"""Ways to go that are predicted to raise the loss alike; each is a displacement of every place."""


def random_directions(blocks: Sequence[BlockPerturbation], examples: int, seed: int) -> Iterator[Displacements]:
    """In all directions, and back: for every rise, z and -z."""
    for number, rise in enumerate(RISES):
        step = step_for_rise(blocks, rise * examples)
        generator = numbered(seed, number)
        pushed = [block.push(step, generator) for block in blocks]
        yield [pushed, [-z for z in pushed]]
        if not step:
            break  # nothing holds against the push any more: there is no further to go


def along_gradient(
    blocks: Sequence[BlockPerturbation], gradient: Mapping[str, Tensor], examples: int
) -> Iterator[Displacements]:
    """Along L^-1 gradient, as far as every rise."""
    direction = [block.followed(gradient) for block in blocks]
    predicted = sum(block.rise(z) for block, z in zip(blocks, direction, strict=True)) / examples
    if predicted > 0 and math.isfinite(predicted):
        yield from ([[math.sqrt(rise / predicted) * z for z in direction]] for rise in RISES)


def step_for_rise(blocks: Sequence[BlockPerturbation], rise: float) -> float:
    """The step at which a push is expected to have this rise under the Fisher of all tasks; 0 where none has."""

    def expected(step: float) -> float:
        return sum(2 * block.square * block.spectrum.expected_rise(step) for block in blocks)

    if expected(0.0) <= rise:
        return 0.0
    return bisected(lambda step: expected(step) > rise, furthest=30.0, close=0.2)[1]


class LossProbe:
    """The loss on some examples, at weights around those that the model has. `untouched` is for who looks."""

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, forward: Forward | None, seed: int
    ) -> None:
        self.model, self.likelihood, self.forward = model, likelihood, forward
        self.parameters = named_parameters(model)
        device = next(iter(self.parameters.values())).device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.batches = [prepared(batch, device) for batch in batches]
        self.targets: list[Any] = []
        self.labels: Tensor | None = None  # how often each was there

    @torch.no_grad()
    def loss(self, displacement: Mapping[str, Tensor]) -> float:
        """The mean negative log likelihood at weights + displacement; nan where nothing is to be predicted."""
        total, count = 0.0, 0.0
        with perturbed(self.parameters, displacement):
            for number, batch in enumerate(self.batches):
                outputs, targets = call(self.model, batch, self.forward)
                if number == len(self.targets):
                    self._meet(outputs, targets)
                targets = self.targets[number]
                total += float(self.likelihood.negative_log_likelihood(outputs, targets))
                count += self.likelihood.count(outputs, targets)
        ranks = current()
        if ranks is not None:
            total, count = ranks.numbers(total, count)
        return total / count if count else math.nan

    def _meet(self, outputs: Any, targets: Any) -> None:
        """A batch that is seen for the first time: its targets, or the model's own where it has none."""
        targets = self.likelihood.sample(outputs, self.generator) if targets is None else targets
        self.targets.append(targets)
        counts = self.likelihood.label_counts(outputs, targets)
        if counts is not None:
            self.labels = counts if self.labels is None else self.labels + counts

    def towards_unseen(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """The gradient of the mean log likelihood of labels that never came; None where all did. After `loss`."""
        ranks, labels = current(), self.labels
        if ranks is not None:
            labels = ranks.sum({} if labels is None else {"labels": labels}).get("labels")
        if labels is None or labels.sum() < SURE * len(labels) or labels.all():
            return None
        unseen = (labels == 0).nonzero().squeeze(1).to(self.generator.device)
        wanted = [self.parameters[name] for name in names]
        gradients = [torch.zeros_like(parameter) for parameter in wanted]
        for batch, targets in zip(self.batches, self.targets, strict=True):
            with trainable(wanted), torch.enable_grad():
                outputs, _ = call(self.model, batch, self.forward)
                loss = self.likelihood.loss(outputs, self.likelihood.relabelled(targets, unseen, self.generator))
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
            for gradient, part in zip(gradients, found, strict=True):
                if part is not None:
                    gradient -= part
        found_by_name = dict(zip(names, gradients, strict=True))
        return found_by_name if ranks is None else ranks.sum(found_by_name)
