"""Continual-learning methods. To add one, subclass `Method` and override `hold`, `learned` and `state` as needed.

>>> from contextlib import nullcontext
>>> from limpet.experiments import METHODS, Method
>>> @METHODS.register("hope")
... class Hope(Method):
...     def hold(self, optimizer, examples):
...         return nullcontext()  # around the training of a task
...
...     def learned(self, lesson, earlier):
...         pass  # after it, with its data
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, NotProtectedWarning, warn
from limpet.experiments.recipe import Recipe
from limpet.experiments.registry import METHODS
from limpet.experiments.tasks import Lesson
from limpet.io.state import State
from limpet.model import running_statistics

CURVATURE_BATCH = 1000


@dataclass(frozen=True)
class Status:
    """Status of a method during training, in nats per example.

    Attributes:
        forecast: The predicted increase of the loss on earlier tasks.
        blocks: The contribution of each block to the forecast.
        budget: The largest forecast allowed.
        penalty: The penalty, scaled like the mean loss.
    """

    forecast: float | None = None
    blocks: Mapping[str, float] = field(default_factory=dict)
    budget: float | None = None
    penalty: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return the forecast and the penalty, those that are not None, by name."""
        return {name: value for name in ("forecast", "penalty") if (value := getattr(self, name)) is not None}


class Method:
    """Plain sequential training of one network: the baseline for all other methods.

    Subclasses override the hooks that they need.

    Args:
        model: The network to train.
        recipe: The recipe of the run.

    Attributes:
        structures: Supported curvature structures, default first; empty if the method has none.
        fresh: Whether each task starts from a new network.
        joint: Whether the method trains on the data of all tasks so far.
    """

    structures: tuple[str, ...] = ()
    fresh = False
    joint = False

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """Return the context manager in which a task is trained.

        Args:
            optimizer: The optimizer of the task.
            examples: Number of training examples of the task.
        """
        return nullcontext()

    def epoch(self, lesson: Lesson) -> None:
        """Handle the end of an epoch other than the last one of a task.

        Args:
            lesson: The data of the task.
        """

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """Handle the end of a task, e.g. by consolidating it.

        Args:
            lesson: The data of the task.
            earlier: Returns the data of all earlier tasks.
        """

    def status(self) -> Status:
        """Return the current status; called about once a second, so it must be cheap."""
        return Status()

    def state(self) -> State:
        """Return the state needed to resume, also in the middle of a task."""
        return {"metadata": "{}", "tensors": {}}

    def load(self, state: State) -> None:
        """Restore a state returned by `state`."""

    def save(self, path: Path) -> None:
        """Save the memory of the method, if any, to a file."""

    @property
    def nbytes(self) -> int:
        """Number of bytes stored between tasks in addition to the network."""
        return 0


METHODS.register("fine-tuning")(Method)


@METHODS.register("joint")
class Joint(Method):
    """A new network trained on the data of all tasks so far: the reference if all data could be stored."""

    fresh = joint = True


@METHODS.register("one-network-per-task")
class OneNetworkPerTask(Method):
    """A separate network per task: no forgetting and no transfer."""

    fresh = True


class WithMemory(Method):
    """Training protected by a limpet memory."""

    memory: limpet.Memory
    _examples = 1  # of the current task

    @contextmanager
    def _creating(self) -> Iterator[None]:
        """Create the memory in the body. Its warning about running statistics names the setting that freezes them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotProtectedWarning)
            yield
        statistics = list(running_statistics(self.model))
        if statistics and not self.recipe.training.freeze_batch_norm:
            warn(
                f"not protected: {len(statistics)} running statistics of batch norm (such as {statistics[0]}), which "
                "follow the newest task. Freeze them after the first task with --set training.freeze_batch_norm=true",
                NotProtectedWarning,
            )

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """Return `memory.protect(...)`."""
        options = self.recipe.memory
        every = options.every if options.mode != "gradient" and isinstance(optimizer, torch.optim.SGD) else 1
        self._examples = examples
        return self.memory.protect(optimizer, examples=examples, every=every, mode=options.mode, budget=options.budget)

    @torch.no_grad()
    def status(self) -> Status:
        """Return the memory's forecast and penalty."""
        if not self.memory.tasks:
            return Status()
        forecast = self.memory._forecast()
        penalty = float(self.memory.penalty()) / self._examples
        return Status(float(forecast), forecast.blocks, self.recipe.memory.budget, penalty)

    def state(self) -> State:
        """Return the state dict of the memory."""
        return self.memory.state_dict()

    def load(self, state: State) -> None:
        """Restore the state dict of the memory."""
        self.memory.load_state_dict(state)

    def save(self, path: Path) -> None:
        """Save the memory file."""
        self.memory.save(path)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self.memory.nbytes


class Laplace(WithMemory):
    """Base class of the three Laplace methods of the paper."""

    kind: type[limpet.OnlineLaplace | limpet.PerTaskLaplace | limpet.ApproximateLaplace]
    memory: limpet.OnlineLaplace | limpet.PerTaskLaplace | limpet.ApproximateLaplace
    structures: tuple[str, ...] = ("kronecker", "diagonal", "kronecker-sum", "dense")

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        options = recipe.memory
        with self._creating():
            self.memory = self.kind(
                model,
                structure=recipe.structure or self.structures[0],
                strength=options.strength,
                prior_precision=options.prior_precision,
                fisher=options.fisher,
                smoothing=options.smoothing,
                rank=options.rank,
                energy=options.energy,
                seed=recipe.seed,
            )

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """Call `memory.consolidate`, passing earlier data if the method requires them."""
        options: dict[str, Any] = {}
        if isinstance(self.memory, limpet.ApproximateLaplace):
            options["earlier"] = [Shuffled(older, self.recipe.seed) for older in earlier()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotProtectedWarning)  # heads of other tasks are unused
            self.memory.consolidate(
                Shuffled(lesson, self.recipe.seed),
                limit=self.recipe.memory.limit,
                forward=_forward,
                progress=False,
                **options,
            )


@METHODS.register("online-laplace")
class OnlineLaplace(Laplace):
    """Online Laplace: one Gaussian posterior, updated after every task (section 2.2 of the paper)."""

    kind = limpet.OnlineLaplace


@METHODS.register("per-task-laplace")
class PerTaskLaplace(Laplace):
    """Per-task Laplace: one quadratic penalty per task; EWC if diagonal."""

    kind = limpet.PerTaskLaplace


@METHODS.register("approximate-laplace")
class ApproximateLaplace(Laplace):
    """Approximate Laplace: all curvature measured again after every task, which requires the old data."""

    kind = limpet.ApproximateLaplace


@METHODS.register("repair")
class Repair(Laplace):
    """Plain training with one repair after every task, of strength `memory.repair`."""

    kind = limpet.OnlineLaplace
    memory: limpet.OnlineLaplace

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """Train without protection."""
        return nullcontext()

    def status(self) -> Status:
        """Return the memory's forecast; there is no penalty."""
        if not self.memory.tasks:
            return Status()
        forecast = self.memory._forecast()
        return Status(float(forecast), forecast.blocks)

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """Call `limpet.repair`, then `memory.consolidate`."""
        self._repair(lesson)
        super().learned(lesson, earlier)

    def _repair(self, lesson: Lesson) -> None:
        if not self.memory.tasks:
            return
        options = self.recipe.memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotProtectedWarning)  # heads of other tasks are unused
            limpet.repair(
                self.model,
                self.memory,
                Shuffled(lesson, self.recipe.seed),
                strength=options.repair,
                limit=options.limit,
                forward=_forward,
                progress=False,
            )


@METHODS.register("repair-rounds")
class RepairRounds(Repair):
    """Plain training with a repair after every epoch, which keeps displacements small."""

    def epoch(self, lesson: Lesson) -> None:
        """Call `limpet.repair`."""
        self._repair(lesson)


@METHODS.register("protect-repair")
class ProtectRepair(Repair):
    """Protection during training (`memory.strength`) and a repair after every task (`memory.repair`)."""

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """Return `memory.protect(...)`."""
        return WithMemory.hold(self, optimizer, examples)

    def status(self) -> Status:
        """Return the memory's forecast and penalty."""
        return WithMemory.status(self)


@METHODS.register("si")
class SynapticIntelligence(WithMemory):
    """Synaptic Intelligence; the strength is c."""

    memory: limpet.SynapticIntelligence

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        strength = recipe.memory.strength
        if isinstance(strength, str):
            raise LimpetError("si does not support strength='auto': pass its c as a number, e.g. --strength 0.1")
        with self._creating():
            self.memory = limpet.SynapticIntelligence(model, strength=strength, damping=recipe.memory.damping)

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """Call `memory.consolidate`, which needs no data."""
        self.memory.consolidate()


class Shuffled:
    """Batches (inputs, labels, head) of a task in a seeded random order, so that the first n are a random sample.

    Args:
        lesson: The data of the task.
        seed: Seed of the order.
    """

    def __init__(self, lesson: Lesson, seed: int) -> None:
        self.lesson, self.seed = lesson, seed
        self.examples = len(lesson.train)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        train = self.lesson.train
        order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(self.seed))
        for inputs, labels in train.batches(CURVATURE_BATCH, order.to(train.labels.device)):
            yield inputs, labels, self.lesson.head


def _forward(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor]:
    inputs, labels, head = batch
    return model(inputs, head), labels


def with_structure(recipe: Recipe) -> Recipe:
    """Return the recipe with its method's default structure filled in.

    Args:
        recipe: The recipe.

    Returns:
        The recipe, unchanged if it has a structure or its method has none.

    Raises:
        LimpetError: If the method does not support the structure.
    """
    allowed = METHODS[recipe.method].structures
    if recipe.structure is None:
        return recipe.model_copy(update={"structure": allowed[0]}) if allowed else recipe
    if recipe.structure not in allowed:
        supported = f"supports {', '.join(allowed)}" if allowed else "has no structure option"
        raise LimpetError(f"{recipe.method} {supported}, not {recipe.structure!r}")
    return recipe
