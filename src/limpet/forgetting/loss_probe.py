"""The loss of a fixed set of examples, and the drift of its outputs, at displaced weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import current, is_sharded, reshard
from limpet.errors import UnsupportedError
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, named_parameters, perturbed, prepared, trainable
from limpet.model.batch import first_example
from limpet.model.context import without_gradients
from limpet.model.unsharded import UnshardedParameters

SURE = 20
"""Mean count per label from which a label that does not occur is considered absent from the task, not just rare."""


class LossProbe:
    """The loss on a fixed set of examples, at weights displaced from those of the model.

    It does not preserve buffers, modes or random states: wrap its use in `limpet.model.preserve_state`. For a sharded
    model (FSDP2), whose forward pass is a collective, `loss` is one, too: all ranks run as many batches as the rank
    with the most.

    Args:
        model: The model.
        batches: The examples; of several ranks, those of this rank.
        likelihood: The likelihood of the outputs.
        forward: Function forward(model, batch) -> (outputs, targets), or None for the default.
        seed: Seed for targets that are sampled from the model.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, forward: Forward | None, seed: int
    ) -> None:
        self.model, self.likelihood, self.forward = model, likelihood, forward
        reshard(model)
        self.parameters = named_parameters(model)
        device = next(iter(self.parameters.values())).device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.batches = [prepared(batch, device) for batch in batches]
        self.sharded = any(map(is_sharded, self.parameters.values()))
        self.fillers = self._fillers()
        self.targets: list[Any] = []
        self.labels: Tensor | None = None  # count of each label
        self.before: list[tuple[dict[str, Tensor], int]] = []  # outputs to compare with, and how many count

    def _fillers(self) -> list[Any]:
        """Batches that this rank runs in addition to its own and does not count, because others have more."""
        ranks = current()
        if ranks is None or not self.sharded:
            return []
        counts = ranks.gather(len(self.batches))
        most = max(counts)
        if most == min(counts):
            return []
        source = counts.index(most)
        sent = ranks.broadcast(first_example(self.batches[0]) if ranks.rank == source else None, source)
        return [prepared(sent, self.generator.device)] * (most - len(self.batches))

    def _run_fillers(self) -> None:
        for filler in self.fillers:
            call(self.model, filler, self.forward)

    @contextmanager
    def _displaced(self, displacement: Mapping[str, Tensor]) -> Iterator[None]:
        """Run the body at displaced weights. A sharded model forgets what it gathered before and after it."""
        try:
            reshard(self.model)
            with perturbed(self.parameters, displacement):
                yield
        finally:
            reshard(self.model)

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
        with self._displaced(displacement):
            for number, batch in enumerate(self.batches):
                outputs, targets = call(self.model, batch, self.forward)
                if number == len(self.targets):
                    self._record_targets(outputs, targets)
                targets = self.targets[number]
                total += float(self.likelihood.negative_log_likelihood(outputs, targets))
                count += self.likelihood.count(outputs, targets)
            self._run_fillers()
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
            The gradient, summed over the examples of all ranks, by parameter name. Of a sharded model, the shards of
            a multiple of it.
        """
        if self.sharded:
            return self._sharded_gradient(names, relabel)
        wanted = [self.parameters[name] for name in names]
        gradients: list[Tensor | None] = [None] * len(wanted)
        for batch, targets in zip(self.batches, self.targets, strict=True):
            with trainable(wanted), torch.enable_grad():
                outputs, _ = call(self.model, batch, self.forward)
                loss = self.likelihood.loss(outputs, relabel(targets))
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
            for i, added in enumerate(found):
                added = added.to_dense() if added is not None and added.is_sparse else added
                before = gradients[i]
                gradients[i] = added if before is None else before if added is None else before + added
        each = zip(names, wanted, gradients, strict=True)
        total = {name: torch.zeros_like(p) if gradient is None else gradient for name, p, gradient in each}
        ranks = current()
        return total if ranks is None else ranks.sum(total)

    def _sharded_gradient(self, names: Sequence[str], relabel: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Let `fully_shard` reduce the gradient as in training, where it divides by a number of its own."""
        live, found = UnshardedParameters(self.model), dict[str, Tensor]()
        with without_gradients(self.model), live.watched(trainable=names), torch.enable_grad():
            for batch, targets in zip(self.batches, self.targets, strict=True):
                outputs, _ = call(self.model, batch, self.forward)
                torch.autograd.backward(self.likelihood.loss(outputs, relabel(targets)))
            for filler in self.fillers:
                outputs, targets = call(self.model, filler, self.forward)
                targets = self.likelihood.sample(outputs, self.generator) if targets is None else targets
                torch.autograd.backward(0.0 * self.likelihood.loss(outputs, targets))
            for name in names:
                parameter = self.parameters[name]
                found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        return found

    def record_outputs(self) -> bool:
        """Keep the present outputs for `drift` to compare with. Requires a previous call of `loss`.

        Returns:
            Whether the likelihood defines a divergence of the outputs, on all ranks.
        """
        self.before, defined = [], True
        with torch.no_grad():
            for batch, targets in zip(self.batches, self.targets, strict=True):
                outputs, _ = call(self.model, batch, self.forward)
                try:
                    summary = self.likelihood.summary(outputs, targets, self.generator)
                except UnsupportedError:
                    defined = False
                else:
                    self.before.append((summary, self.likelihood.count(outputs, targets)))
            self._run_fillers()
        ranks = current()
        return defined if ranks is None else all(ranks.gather(defined))

    @torch.no_grad()
    def drift(self, displacement: Mapping[str, Tensor]) -> float:
        """Compute KL(before || now) at displaced weights. Requires a previous call of `record_outputs`.

        Args:
            displacement: What to add to the parameters, by name.

        Returns:
            The mean over the examples (or predictions) of all ranks.
        """
        total = 0.0
        with self._displaced(displacement):
            for batch, (summary, _) in zip(self.batches, self.before, strict=True):
                outputs, _ = call(self.model, batch, self.forward)
                total += float(self.likelihood.divergence(summary, outputs).double().sum())
            self._run_fillers()
        ranks, count = current(), float(sum(count for _, count in self.before))
        if ranks is not None:
            total, count = ranks.numbers(total, count)
        return total / count if count else math.nan
