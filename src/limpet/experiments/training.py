"""Training on one task: batches, optimizer, learning rate and early stopping, resumable after every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.experiments.recipe import Recipe, Training
from limpet.experiments.tasks import Lesson

FROZEN_CLIP_NORM = 1.0
"""Largest norm of the gradient while batch norm is frozen, with training.clip_norm=auto."""


@dataclass
class Position:
    """Progress of training on a task.

    Attributes:
        epoch: Number of epochs done.
        best: Best validation accuracy so far.
        stale: Number of epochs since the validation accuracy last improved.
    """

    epoch: int = 0
    best: float = -1.0
    stale: int = 0


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Create the optimizer of a recipe.

    Args:
        model: The network.
        training: Training settings.

    Returns:
        SGD or Adam over all parameters.
    """
    if training.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=training.lr)
    momentum = training.momentum
    return torch.optim.SGD(
        model.parameters(), lr=training.lr, momentum=momentum, nesterov=training.nesterov and momentum > 0
    )


def learning_rate(training: Training, strength: float | str, task: int, update: int, per_epoch: int) -> float:
    """Compute the learning rate of an update.

    Args:
        training: Training settings.
        strength: Strength of the memory; "auto" counts as 1.
        task: Index of the task.
        update: Index of the update within the task.
        per_epoch: Number of updates per epoch.

    Returns:
        The learning rate.
    """
    begin = training.lr / (1 + training.task_decay * task)
    if task and training.strength_decay:
        begin /= max(1.0, training.strength_decay * (1.0 if isinstance(strength, str) else strength))
    if training.schedule == "cosine":
        total = training.epochs * per_epoch
        return 0.5 * begin * (1 + math.cos(math.pi * min(update / total, 1.0)))
    if training.schedule == "step":
        span = training.drop_updates or (training.drop_epochs or training.epochs) * per_epoch
        return float(begin * training.drop ** (update // span))
    return begin


class TaskTraining:
    """Training on one task. Each epoch is seeded by (seed, task, epoch), so it can be repeated exactly.

    Args:
        model: The network.
        lessons: Training data, one lesson per head.
        recipe: The recipe.
        task: Index of the task.
        fresh: Whether the network is new, so that its batch-norm statistics are never frozen.
    """

    def __init__(
        self, model: nn.Module, lessons: list[Lesson], recipe: Recipe, task: int, *, fresh: bool = False
    ) -> None:
        self.model, self.lessons, self.recipe, self.task = model, lessons, recipe, task
        self._freezes = recipe.training.freeze_batch_norm and not fresh
        self.optimizer = make_optimizer(model, recipe.training)
        self.position = Position()
        size = recipe.training.batch_size
        self.updates_per_epoch = sum(-(-len(lesson.train) // size) for lesson in lessons)
        self.examples = sum(len(lesson.train) for lesson in lessons)

    @property
    def done(self) -> bool:
        """Whether training has finished."""
        training, at = self.recipe.training, self.position
        if at.epoch < training.epochs:
            return False
        return training.patience is None or at.stale >= training.patience or at.epoch >= training.max_epochs

    def epoch(self, on_update: Callable[[int, int], None]) -> float:
        """Train for one epoch.

        Args:
            on_update: Called after every update with the number of updates done and the total.

        Returns:
            The mean loss over the epoch.

        Raises:
            LimpetError: If the loss is not finite.
        """
        at = self.position
        generator = torch.Generator().manual_seed(_seed(self.recipe.seed, self.task, at.epoch))
        torch.manual_seed(_seed(self.recipe.seed, self.task, at.epoch))  # for dropout etc.
        self._train_mode()
        strength, clip = self.recipe.memory.strength, self._clip_norm()
        losses = []
        for number, (lesson, rows) in enumerate(self._batches(generator)):
            update = at.epoch * self.updates_per_epoch + number
            rate = learning_rate(self.recipe.training, strength, self.task, update, self.updates_per_epoch)
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            inputs, labels = lesson.train.batch(rows)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs, lesson.head), labels)
            torch.autograd.backward(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)  # before the penalty, which acts in the step
            self.optimizer.step()
            losses.append(loss.detach())
            on_update(number + 1, self.updates_per_epoch)
        at.epoch += 1
        mean = float(torch.stack(losses).mean())
        if not math.isfinite(mean):
            raise LimpetError(f"training diverged in epoch {at.epoch} of task {self.task + 1}: {self._divergence()}")
        return mean

    def _norms(self) -> list[nn.modules.batchnorm._NormBase]:
        """The modules with running statistics: batch norm, and instance norm that tracks them."""
        norms = (module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
        return [norm for norm in norms if norm.track_running_stats]

    def _train_mode(self) -> None:
        self.model.train()
        for norm in self._frozen():
            norm.eval()

    def _frozen(self) -> list[nn.modules.batchnorm._NormBase]:
        return self._norms() if self._freezes and self.task else []

    def _clip_norm(self) -> float | None:
        clip = self.recipe.training.clip_norm
        return (FROZEN_CLIP_NORM if self._frozen() else None) if isinstance(clip, str) else clip

    @torch.no_grad()
    def finish(self) -> None:
        """Measure the statistics of batch norm that are to be frozen: over all data of the first task, at its end.

        During training they are moving averages over batches and changing weights, and after few updates still close to
        where they began. Later tasks would train with activations that are not normalized, and diverge.
        """
        norms = self._norms() if self._freezes and not self.task else []
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        self.model.eval()  # no dropout
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over batches
            norm.train()
        for lesson, rows in self._batches(torch.Generator().manual_seed(_seed(self.recipe.seed, self.task, 0))):
            self.model(lesson.train.batch(rows)[0], lesson.head)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    def _divergence(self) -> str:
        """Say which settings make a diverging training stable, those of the penalty first."""
        memory = self.recipe.memory
        if self.task and memory.every > 1 and memory.mode != "gradient" and self.recipe.training.optimizer == "sgd":
            return f"try memory.every=1 (now {memory.every}), or a smaller training.lr"
        return "try a smaller training.lr"

    def judge(self, validation: float) -> None:
        """Record the validation accuracy of an epoch for early stopping."""
        at = self.position
        at.stale = 0 if validation > at.best else at.stale + 1
        at.best = max(at.best, validation)

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Lesson, Tensor]]:
        """Iterate over batches of a single head each, with heads in random order."""
        size = self.recipe.training.batch_size
        batches = []
        for lesson in self.lessons:
            order = torch.randperm(len(lesson.train), generator=generator)
            batches += [(lesson, rows) for rows in torch.split(order.to(lesson.train.labels.device), size)]
        if len(self.lessons) > 1:
            yield from (batches[i] for i in torch.randperm(len(batches), generator=generator).tolist())
        else:
            yield from batches


def _seed(seed: int, task: int, epoch: int) -> int:
    return (seed * 1_000_003 + task) * 1009 + epoch


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split an optimizer's state into plain values and tensors, keyed by "number/name"."""
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            (tensors if isinstance(value, Tensor) else values)[f"{number}/{name}"] = value
    return values, tensors


def load_optimizer_state(optimizer: torch.optim.Optimizer, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore an optimizer's state.

    Args:
        optimizer: The optimizer.
        values: Plain values from `optimizer_state`.
        tensors: Tensors from `optimizer_state`.
    """
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**values, **tensors}.items():
        number, _, name = key.partition("/")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
