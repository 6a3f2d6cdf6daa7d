"""What is done against forgetting. A new method is one class with up to three verbs: hold, learned, state.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, NotProtectedWarning
from limpet.experiments.recipe import Recipe
from limpet.experiments.registry import Registry
from limpet.experiments.tasks import Lesson
from limpet.io.state import State

CURVATURE_BATCH = 1000


@dataclass(frozen=True)
class Status:
    """What a method can say while a task is learned, in nats per example."""

    forecast: float | None = None  # the predicted rise of the loss on older tasks,
    blocks: Mapping[str, float] = field(default_factory=dict)  # the share of each block of weights,
    budget: float | None = None  # and what is allowed
    penalty: float | None = None  # as it stands beside the loss

    def numbers(self) -> dict[str, float]:
        """What is worth a curve in the log."""
        return {name: value for name in ("forecast", "penalty") if (value := getattr(self, name)) is not None}


class Method:
    """Plain training of one network, task after task: what every other method is measured against."""

    structures: tuple[str, ...] = ()  # the first is the default; none: the method has no structure
    fresh = False  # a new network for every task
    joint = False  # trains on the data of all tasks so far

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """What is around the training of a task of so many examples."""
        return nullcontext()

    def epoch(self, lesson: Lesson) -> None:
        """Another epoch of a task is over, and it is not the last one."""

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """A task is trained; `lesson` is what it was trained on, `earlier()` what the tasks before were."""

    def status(self) -> Status:
        """What is known now, cheap enough to be asked for once a second."""
        return Status()

    def state(self) -> State:
        """What the method must remember to go on, also in the middle of a task."""
        return {"metadata": "{}", "tensors": {}}

    def load(self, state: State) -> None:
        """Go on from a state."""

    def save(self, path: Path) -> None:
        """Keep what is known in a file."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between tasks, beside the network."""
        return 0


METHODS: Registry[type[Method]] = Registry("method")
METHODS.register("fine-tuning")(Method)


@METHODS.register("joint")
class Joint(Method):
    """A new network trained on the data of all tasks so far: what would be possible if all data were kept."""

    fresh = joint = True


@METHODS.register("one-network-per-task")
class OneNetworkPerTask(Method):
    """A network for every task, so nothing can be forgotten and nothing is shared."""

    fresh = True


class WithMemory(Method):
    """A limpet memory holds the network."""

    memory: limpet.Memory
    _examples = 1  # of the task being learned

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """`memory.protect`."""
        options = self.recipe.memory
        every = options.every if options.mode != "gradient" and isinstance(optimizer, torch.optim.SGD) else 1
        self._examples = examples
        return self.memory.protect(optimizer, examples=examples, every=every, mode=options.mode, budget=options.budget)

    @torch.no_grad()
    def status(self) -> Status:
        """The memory's forecast and penalty."""
        if not self.memory.tasks:
            return Status()
        forecast = self.memory.forecast()
        penalty = float(self.memory.penalty()) / self._examples
        return Status(float(forecast), forecast.blocks, self.recipe.memory.budget, penalty)

    def state(self) -> State:
        """The memory's own."""
        return self.memory.state_dict()

    def load(self, state: State) -> None:
        """The memory's own."""
        self.memory.load_state_dict(state)

    def save(self, path: Path) -> None:
        """A memory file."""
        self.memory.save(path)

    @property
    def nbytes(self) -> int:
        """The memory's own."""
        return self.memory.nbytes


class Laplace(WithMemory):
    """The three Laplace methods of the paper."""

    kind: type[limpet.OnlineLaplace | limpet.PerTaskLaplace | limpet.ApproximateLaplace]
    memory: limpet.OnlineLaplace | limpet.PerTaskLaplace | limpet.ApproximateLaplace
    structures = ("kronecker", "diagonal", "kronecker-sum", "dense")

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        options = recipe.memory
        self.memory = self.kind(
            model,
            structure=recipe.structure or self.structures[0],
            strength=options.strength,
            prior_precision=options.prior_precision,
            fisher=options.fisher,
            smoothing=options.smoothing,
            seed=recipe.seed,
        )

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """`memory.consolidate`, with the older data where the method asks for them."""
        options: dict[str, Any] = {}
        if isinstance(self.memory, limpet.ApproximateLaplace):
            options["earlier"] = [Shuffled(older, self.recipe.seed) for older in earlier()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotProtectedWarning)  # heads of other tasks go unused
            self.memory.consolidate(
                Shuffled(lesson, self.recipe.seed),
                limit=self.recipe.memory.limit,
                forward=_forward,
                progress=False,
                **options,
            )


@METHODS.register("online-laplace")
class OnlineLaplace(Laplace):
    """One Gaussian that takes in every task (section 2.2 of the paper)."""

    kind = limpet.OnlineLaplace


@METHODS.register("per-task-laplace")
class PerTaskLaplace(Laplace):
    """A penalty for every task; with a diagonal it is EWC."""

    kind = limpet.PerTaskLaplace


@METHODS.register("approximate-laplace")
class ApproximateLaplace(Laplace):
    """All curvature measured anew after every task, which needs the old data."""

    kind = limpet.ApproximateLaplace


@METHODS.register("repair")
class Repair(Laplace):
    """Plain training, and one repair after every task; `memory.repair` is its strength."""

    kind = limpet.OnlineLaplace
    memory: limpet.OnlineLaplace

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """Nothing holds."""
        return nullcontext()

    def status(self) -> Status:
        """The memory's forecast: there is no penalty."""
        if not self.memory.tasks:
            return Status()
        forecast = self.memory.forecast()
        return Status(float(forecast), forecast.blocks)

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """`limpet.repair`, then `memory.consolidate`."""
        self._repair(lesson)
        super().learned(lesson, earlier)

    def _repair(self, lesson: Lesson) -> None:
        if not self.memory.tasks:
            return
        options = self.recipe.memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotProtectedWarning)  # heads of other tasks go unused
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
    """Plain training with a repair after every epoch, so that no displacement gets large."""

    def epoch(self, lesson: Lesson) -> None:
        """`limpet.repair`."""
        self._repair(lesson)


@METHODS.register("protect-repair")
class ProtectRepair(Repair):
    """Protection while a task is learned (`memory.strength`), and a repair after it (`memory.repair`)."""

    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> AbstractContextManager[Any]:
        """`memory.protect`."""
        return WithMemory.hold(self, optimizer, examples)

    def status(self) -> Status:
        """The memory's forecast and penalty."""
        return WithMemory.status(self)


@METHODS.register("si")
class SynapticIntelligence(WithMemory):
    """Synaptic Intelligence; the strength is its c."""

    memory: limpet.SynapticIntelligence

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        strength = recipe.memory.strength
        if isinstance(strength, str):
            raise LimpetError("si has no strength='auto': give its c, such as --strength 0.1")
        self.memory = limpet.SynapticIntelligence(model, strength=strength, damping=recipe.memory.damping)

    def learned(self, lesson: Lesson, earlier: Callable[[], Iterable[Lesson]]) -> None:
        """No data are needed."""
        self.memory.consolidate()


class Shuffled:
    """A task's data as batches (inputs, labels, head), in an order that the seed decides: the first n are a sample."""

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
    """The recipe with its method's default structure, or an error where the two do not go together."""
    allowed = METHODS[recipe.method].structures
    if recipe.structure is None:
        return recipe.model_copy(update={"structure": allowed[0]}) if allowed else recipe
    if recipe.structure not in allowed:
        takes = f"takes {', '.join(allowed)}" if allowed else "has no structure"
        raise LimpetError(f"{recipe.method} {takes}, not {recipe.structure!r}")
    return recipe
