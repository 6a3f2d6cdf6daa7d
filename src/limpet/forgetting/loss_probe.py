"""The loss of a fixed set of examples, and the drift of its outputs, at displaced weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import current
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, named_parameters, perturbed, prepared, trainable

SURE = 20
"""Mean count per label from which a label that does not occur is considered absent from the task, not just rare."""


class LossProbe:
    """The loss on a fixed set of examples, at weights displaced from those of the model.

    It does not preserve buffers, modes or random states: wrap its use in `limpet.model.preserve_state`.

    Args:
        model: The model.
        batches: The examples.
        likelihood: The likelihood of the outputs.
        forward: Function forward(model, batch) -> (outputs, targets), or None for the default.
        seed: Seed for targets that are sampled from the model.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, forward: Forward | None, seed: int
    ) -> None:
        self.model, self.likelihood, self.forward = model, likelihood, forward
        self.parameters = named_parameters(model)
        device = next(iter(self.parameters.values())).device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.batches = [prepared(batch, device) for batch in batches]
        self.targets: list[Any] = []
        self.labels: Tensor | None = None  # count of each label
        self.before: list[tuple[dict[str, Tensor], int]] = []  # outputs to compare with, and how many count

    @torch.no_grad()
    def loss(self, displacement: Mapping[str, Tensor]) -> float:
        """Compute the mean negative log likelihood at displaced weights.

        The first call fixes the targets: those of the batches, or samples from the model if they have none.

        Args:
            displacement: What to add to the parameters, by name.

        Returns:
            The mean loss over the examples of all ranks; nan if there are no targets.
        """
        total, count = 0.0, 0.0
        with perturbed(self.parameters, displacement):
            for number, batch in enumerate(self.batches):
                outputs, targets = call(self.model, batch, self.forward)
                if number == len(self.targets):
                    self._record_targets(outputs, targets)
                targets = self.targets[number]
                total += float(self.likelihood.negative_log_likelihood(outputs, targets))
                count += self.likelihood.count(outputs, targets)
        ranks = current()
        if ranks is not None:
            total, count = ranks.numbers(total, count)
        return total / count if count else math.nan

    def _record_targets(self, outputs: Any, targets: Any) -> None:
        """Store the targets of a new batch, sampled from the model if it has none, and count their labels."""
        targets = self.likelihood.sample(outputs, self.generator) if targets is None else targets
        self.targets.append(targets)
        counts = self.likelihood.label_counts(outputs, targets)
        if counts is not None:
            self.labels = counts if self.labels is None else self.labels + counts

    def towards_unseen(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Compute the gradient of the log likelihood of labels that do not occur. Requires a previous call of `loss`.

        Args:
            names: Names of the parameters to differentiate by.

        Returns:
            The gradient by parameter name; None if all labels occur, the targets are not labels, or there are too few
            examples to tell.
        """
        ranks, labels = current(), self.labels
        if ranks is not None:
            labels = ranks.sum({} if labels is None else {"labels": labels}).get("labels")
        if labels is None or labels.sum() < SURE * len(labels) or labels.all():
            return None
        unseen = (labels == 0).nonzero().squeeze(1).to(self.generator.device)
        found = self.gradient(names, lambda targets: self.likelihood.relabelled(targets, unseen, self.generator))
        return {name: -value for name, value in found.items()}

    def gradient(self, names: Sequence[str], relabel: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Compute the gradient of the loss with other targets. Requires a previous call of `loss`.

        Args:
            names: Names of the parameters to differentiate by.
            relabel: Function from the targets of a batch to those to use.

        Returns:
            The gradient, summed over the examples of all ranks, by parameter name.
        """
        wanted = [self.parameters[name] for name in names]
        gradients: list[Tensor | None] = [None] * len(wanted)
        for batch, targets in zip(self.batches, self.targets, strict=True):
            with trainable(wanted), torch.enable_grad():
                outputs, _ = call(self.model, batch, self.forward)
                loss = self.likelihood.loss(outputs, relabel(targets))
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
            for i, part in enumerate(found):
                part = part.to_dense() if part is not None and part.is_sparse else part
                before = gradients[i]
                gradients[i] = part if before is None else before if part is None else before + part
        each = zip(names, wanted, gradients, strict=True)
        total = {name: torch.zeros_like(p) if gradient is None else gradient for name, p, gradient in each}
        ranks = current()
        return total if ranks is None else ranks.sum(total)

    def record_outputs(self) -> None:
        """Keep the present outputs for `drift` to compare with. Requires a previous call of `loss`."""
        self.before = []
        with torch.no_grad():
            for batch, targets in zip(self.batches, self.targets, strict=True):
                outputs, _ = call(self.model, batch, self.forward)
                summary = self.likelihood.summary(outputs, targets, self.generator)
                self.before.append((summary, self.likelihood.count(outputs, targets)))

    @torch.no_grad()
    def drift(self, displacement: Mapping[str, Tensor]) -> float:
        """Compute KL(before || now) at displaced weights. Requires a previous call of `record_outputs`.

        Args:
            displacement: What to add to the parameters, by name.

        Returns:
            The mean over the examples (or predictions) of all ranks.
        """
        total = 0.0
        with perturbed(self.parameters, displacement):
            for batch, (summary, _) in zip(self.batches, self.before, strict=True):
                outputs, _ = call(self.model, batch, self.forward)
                total += float(self.likelihood.divergence(summary, outputs).double().sum())
        ranks, count = current(), float(sum(count for _, count in self.before))
        if ranks is not None:
            total, count = ranks.numbers(total, count)
        return total / count if count else math.nan
