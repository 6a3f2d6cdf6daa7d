"""Measure drift, the divergence of a model's predictions from those of the model before, with forward passes alone.

    drift = mean over examples (or predicted tokens) of KL(before || now)

Drift is measured on outputs rather than predicted from weights, so it does not depend on an approximation of the
curvature and stays valid whatever was done to the weights, repair included. It has no first-order term: it takes its
minimum, zero, at the model before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import LimpetWarning, warn
from limpet.forgetting.probe import Probe
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, prepared, preserve_state, trainable
from limpet.model.batch import without_padding
from limpet.posterior import Posterior

CONFIDENCE = 1.64
"""Standard errors between the mean and the upper end of a one-sided 95 % confidence interval."""


class Drift(float):
    """KL(before || now) in nats per example or predicted token: a float with a standard error.

    Attributes:
        standard_error: Standard error of the mean, with examples (whole sequences) as the sampling units.
        examples: Number of examples.
        blocks: Contribution of each block to the drift, by name; empty unless requested.
    """

    standard_error: float
    examples: int
    blocks: dict[str, float]

    def __new__(cls, sums: Sequence[float], counts: Sequence[float], blocks: dict[str, float] | None = None) -> Drift:
        """Compute the mean and its standard error from the sums and counts of the examples.

        Args:
            sums: Sum of the KL divergence over the predictions of each example.
            counts: Number of predictions in each example.
            blocks: Contribution of each block to the drift, by name.
        """
        total = sum(counts)
        mean = sum(sums) / total if total else 0.0
        drift = super().__new__(cls, mean)
        n = len(sums)
        squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
        drift.standard_error = math.sqrt(squares * n / (n - 1)) / total if n > 1 and total else math.nan
        drift.examples, drift.blocks = n, blocks or {}
        return drift

    @classmethod
    def pooled(cls, mean: float, standard_error: float, examples: int) -> Drift:
        """Make a drift from its mean and standard error, such as one combined over ranks.

        Args:
            mean: The mean, in nats per example or predicted token.
            standard_error: Standard error of the mean.
            examples: Number of examples.

        Returns:
            The drift.
        """
        drift = cls([mean], [1.0])
        drift.standard_error, drift.examples = standard_error, examples
        return drift

    @property
    def upper(self) -> float:
        """Upper end of the one-sided 95 % confidence interval: mean + 1.64 standard errors (0 for one example)."""
        return float(self) if math.isnan(self.standard_error) else float(self) + CONFIDENCE * self.standard_error

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Support copy and pickle, which restore the attributes afterwards."""
        return [float(self)], [1.0], {}

    def __str__(self) -> str:
        worst = sorted(self.blocks.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {value:.3g}" for name, value in worst)
        return f"{float(self):.4g} +- {self.standard_error:.2g} nats" + (f" (most in {named})" if named else "")


def drift(
    posterior: Posterior,
    probes: Sequence[Probe],
    likelihood: Likelihood,
    forward: Forward | None = None,
    *,
    reference: nn.Module | None = None,
    blocks: bool = False,
) -> Drift:
    """Measure the drift of a memory's model on its probes, as `memory.drift` returns it.

    Outputs are compared through the head that they were recorded with if it was replaced (`Probe.through_head`). Warns
    if parameters that the memory does not cover have changed otherwise, unless `forward` is given.

    Args:
        posterior: The posterior of the memory.
        probes: Inputs with summaries of the outputs before.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the probes were recorded with.
        reference: The model before. If given, its outputs are computed instead of using the stored summaries.
        blocks: Whether to also compute the contribution of each block.

    Returns:
        The drift.
    """
    model = posterior.model
    compared = [probe for probe in probes if not probe.head_was_replaced(model)]
    changed = sorted({name for probe in compared for name in probe.changed_outside(model)})
    if changed and forward is None:
        warn(
            f"{len(changed)} parameters not covered by the memory (such as {changed[0]}) have changed and contribute "
            "to this drift: if the model has a new head, compare through the old one with "
            "drift(forward=lambda model, batch: ...)",
            LimpetWarning,
        )
    if reference is None:
        found = measured_drift(model, probes, likelihood, forward)
    else:
        found = exact_drift(model, reference, probes, likelihood, forward)
    if blocks:
        parts = shares(posterior, probes, likelihood, forward)
        found.blocks = {name: share * float(found) for name, share in parts.items()}
    return found


def measured_drift(
    model: nn.Module, probes: Iterable[Probe], likelihood: Likelihood, forward: Forward | None = None
) -> Drift:
    """Measure the drift of a model from the outputs stored in probes.

    Args:
        model: The model. Its state is preserved.
        probes: Inputs with summaries of the outputs before.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the probes were recorded with.

    Returns:
        The drift.
    """
    sums: list[float] = []
    counts: list[float] = []
    with preserve_state(model), torch.no_grad():
        for probe in probes:
            with probe.through_head(model):
                for values, counted in _divergences(model, probe, likelihood, forward):
                    sums += values.double().sum(1).tolist()
                    counts += counted.tolist()
    return Drift(sums, counts)


def information(probes: Sequence[Probe], likelihood: Likelihood) -> float:
    """Compute the drift of a model that gives the same answer to every input of a probe.

    It is an upper limit of what there is to retain: outputs that are nearly uniform, or alike for all inputs, drift
    little even when a model forgets everything.

    Args:
        probes: Inputs with summaries of the outputs.
        likelihood: The likelihood of the outputs.

    Returns:
        The mean over the examples of all probes, in nats; infinity if it is not known for one of them.
    """
    total, rows = 0.0, 0
    for probe in probes:
        found = likelihood.information(probe.summaries)
        count = sum(len(next(iter(summary.values()))) for summary in probe.summaries)
        total += math.inf if found is None else probe.scale * found * count
        rows += count
    return total / rows if rows else math.inf


def _divergences(
    model: nn.Module, probe: Probe, likelihood: Likelihood, forward: Forward | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for every batch, the KL per example and position and the number of counted positions per example."""
    device = next(model.parameters()).device
    for batch, summary in zip(probe.batches, probe.summaries, strict=True):
        outputs, _ = call(model, prepared(batch, device), forward)
        found = likelihood.divergence(summary, outputs) * probe.scale
        yield by_example(found, summary.get("counted"), batch)


def by_example(values: Tensor, counted: Tensor | None, batch: Any) -> tuple[Tensor, Tensor]:
    """Arrange values by example, without those of positions that do not count.

    Args:
        values: One value per example, or per position, 0 where `counted` is.
        counted: Which positions count. By default those that are not padding.
        batch: The batch, which may have an attention mask.

    Returns:
        The values, of shape (examples, positions), and the number of positions of each example that count.
    """
    if counted is None and (real := without_padding(batch)) is not None and real.shape == values.shape:
        counted = real
        values = values.masked_fill(~real.to(values.device), 0)
    values = values.reshape(len(values), -1)
    if counted is None:
        return values, torch.full((len(values),), values.shape[1], device=values.device)
    return values, counted.reshape(len(counted), -1).sum(1)


def exact_drift(
    model: nn.Module,
    reference: nn.Module,
    probes: Iterable[Probe],
    likelihood: Likelihood,
    forward: Forward | None = None,
) -> Drift:
    """Measure KL(reference || model) over all classes, with forward passes of both models over the probes' inputs.

    Args:
        model: The model as it is now.
        reference: The model before.
        probes: The inputs, and which positions count. Their stored outputs are not used.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the probes were recorded with.

    Returns:
        The drift.
    """
    computed = (one for probe in probes for one in probe.with_outputs_of(reference, likelihood, forward))
    with preserve_state(reference), torch.no_grad():
        return measured_drift(model, computed, likelihood, forward)


def shares(
    posterior: Posterior, probes: Sequence[Probe], likelihood: Likelihood, forward: Forward | None = None
) -> dict[str, float]:
    """Attribute the drift to blocks: gradient of the drift times displacement, as a fraction of the total.

    For a quadratic this divides the drift exactly, with the interaction of two blocks split evenly between them. It
    takes one backward pass over the probes and needs no curvature.

    Args:
        posterior: The posterior of the memory, whose means are the weights before.
        probes: Inputs with summaries of the outputs before.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the probes were recorded with.

    Returns:
        A fraction for every block that stores a task. They add up to 1 if there is any drift.
    """
    model, parameters = posterior.model, posterior.parameters()
    names = [name for held in posterior.held.values() if held.tasks for name in held.block.parameters]
    wanted = [parameters[name] for name in names]
    gradients: dict[str, Tensor] = {}
    with preserve_state(model), trainable(wanted), torch.enable_grad():
        for probe in probes:
            with probe.through_head(model):
                for values, _ in _divergences(model, probe, likelihood, forward):
                    found = torch.autograd.grad(values.sum(), wanted, allow_unused=True)
                    for name, gradient in zip(names, found, strict=True):
                        if gradient is not None:
                            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    weights, raw = posterior.weights(), {}
    for block, held in posterior.held.items():
        if held.tasks:
            moved = held.block.scatter(held.displacement(weights))
            raw[block] = sum(float((gradients[n] * d).sum()) for n, d in moved.items() if n in gradients)
    total = sum(raw.values())
    return {name: value / total if total else 0.0 for name, value in raw.items()}
