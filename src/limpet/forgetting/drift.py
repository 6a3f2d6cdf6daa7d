"""Drift: how far a model's answers are from those before, measured by forward passes alone.

    drift = mean over examples (or predicted tokens) of KL(before || now)

It is not predicted from weights, so no approximation of the curvature enters it, and nothing that was done to the
weights can blind it. It has no first-order term: the model before is its minimum, where it is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import LimpetWarning, warn
from limpet.forgetting.probe import Probe
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, prepared, preserve_state, trainable
from limpet.posterior import Posterior


class Drift(float):
    """KL(before || now) in nats per example or predicted token, with what is known about it.

    Attributes:
        standard_error: Of the mean, with examples (whole sequences) as the units that were drawn.
        examples: How many there were.
        blocks: Each block's share, where it was asked for.
    """

    standard_error: float
    examples: int
    blocks: dict[str, float]

    def __new__(cls, sums: Sequence[float], counts: Sequence[float], blocks: dict[str, float] | None = None) -> Drift:
        """From the sum of KL over each example, and how many predictions it has."""
        total = sum(counts)
        mean = sum(sums) / total if total else 0.0
        drift = super().__new__(cls, mean)
        n = len(sums)
        squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
        drift.standard_error = math.sqrt(squares * n / (n - 1)) / total if n > 1 and total else math.nan
        drift.examples, drift.blocks = n, blocks or {}
        return drift

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies: the attributes come after it, as they are."""
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
    """The drift of a memory's model on its probes, as `memory.drift` gives it.

    Args:
        posterior: What the memory knows.
        probes: Inputs with summaries of the outputs before.
        likelihood: What the outputs mean.
        forward: As it was when the probes were made.
        reference: The model before, whose outputs are then computed rather than remembered.
        blocks: Also find each block's share.

    Returns:
        The drift.
    """
    model = posterior.model
    changed = sorted({name for probe in probes for name in probe.changed_outside(model)})
    if changed and forward is None:
        warn(
            f"{len(changed)} parameters that the memory does not hold (such as {changed[0]}) are not what they were, "
            "and they are part of this drift; where it is a new head, compare through the old one: "
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
    """How far a model is from what its probes remember.

    Args:
        model: The model, which is left as it was.
        probes: Inputs with summaries of the outputs before.
        likelihood: What the outputs mean.
        forward: As it was when the probes were made.

    Returns:
        The drift.
    """
    with preserve_state(model), torch.no_grad():
        return _drift(_divergences(model, probes, likelihood, forward))


def _drift(found: Iterable[tuple[Tensor, Tensor]]) -> Drift:
    """The drift of divergences by example and position, and of how many positions count."""
    sums: list[float] = []
    counts: list[float] = []
    for values, counted in found:
        sums += values.double().sum(1).tolist()
        counts += counted.tolist()
    return Drift(sums, counts)


def _divergences(
    model: nn.Module, probes: Iterable[Probe], likelihood: Likelihood, forward: Forward | None
) -> Iterable[tuple[Tensor, Tensor]]:
    """For every batch, KL by example and position, and how many positions count in each example."""
    device = next(model.parameters()).device
    for probe in probes:
        for batch, summary in zip(probe.batches, probe.summaries, strict=True):
            outputs, _ = call(model, prepared(batch, device), forward)
            found = likelihood.divergence(summary, outputs) * probe.scale
            found = found.reshape(len(found), -1)
            counted = summary.get("counted")
            each = (
                torch.full((len(found),), found.shape[1])
                if counted is None
                else counted.reshape(len(counted), -1).sum(1)
            )
            yield found, each


def exact_drift(
    model: nn.Module,
    reference: nn.Module,
    probes: Iterable[Probe],
    likelihood: Likelihood,
    forward: Forward | None = None,
) -> Drift:
    """KL(reference || model) over all classes, by forward passes of both models over the inputs of probes.

    Args:
        model: The model as it is now.
        reference: The model before.
        probes: Whose inputs are taken, and which positions count.
        likelihood: What the outputs mean.
        forward: As it was when the probes were made.

    Returns:
        The drift.
    """
    device = next(reference.parameters()).device

    def computed() -> Iterator[Probe]:
        for probe in probes:
            for batch, kept in zip(probe.batches, probe.summaries, strict=True):
                outputs, _ = call(reference, prepared(batch, device), forward)
                counted = {name: tensor for name, tensor in kept.items() if name.endswith("counted")}
                yield replace(probe, batches=[batch], summaries=[likelihood.summary(outputs, None) | counted])

    with preserve_state(model), preserve_state(reference), torch.no_grad():
        return _drift(_divergences(model, computed(), likelihood, forward))


def shares(
    posterior: Posterior, probes: Sequence[Probe], likelihood: Likelihood, forward: Forward | None = None
) -> dict[str, float]:
    """Which blocks carry the drift: for each, gradient of the drift times displacement, as a share of the whole.

    For a quadratic these add up to the drift, with what two blocks do together divided evenly between them. It takes
    one backward pass over the probes, and needs no curvature.

    Args:
        posterior: What the memory knows: the weights before.
        probes: Inputs with summaries of the outputs before.
        likelihood: What the outputs mean.
        forward: As it was when the probes were made.

    Returns:
        A number for every block that the memory knows, which add up to 1 where there is any drift.
    """
    model, parameters = posterior.model, posterior.parameters()
    names = [name for held in posterior.held.values() if held.tasks for name in held.block.parameters]
    wanted = [parameters[name] for name in names]
    gradients: dict[str, Tensor] = {}
    with preserve_state(model), trainable(wanted), torch.enable_grad():
        for values, _ in _divergences(model, probes, likelihood, forward):
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
