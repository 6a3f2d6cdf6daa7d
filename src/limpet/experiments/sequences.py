"""Sequences of tasks. A new one is one class: its heads, its input shape, and the data of task number i.

>>> from limpet.experiments import SEQUENCES, Examples, TaskSequence
>>> @SEQUENCES.register("coins")
... class Coins(TaskSequence):
...     shape, heads = (3,), (2,)
...
...     def examples(self, number, split):
...         generator = torch.Generator().manual_seed(100 * self.seed + 2 * number + (split == "test"))
...         x = torch.randn(50, 3, generator=generator)
...         return Examples(x, (x[:, number % 3] > 0).long())
>>> coins = SEQUENCES["coins"](tasks=4, seed=0)
>>> len(coins.examples(3, "train")), coins.name(3)
(50, 'task 4')
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from limpet.errors import LimpetError, LimpetWarning, positive_whole, warn
from limpet.experiments.data import Examples, images
from limpet.experiments.registry import Registry

SCENARIOS = {
    "task": "task-incremental: the task is known at test time and has a head of its own",
    "domain": "domain-incremental: every task has the same classes and the one head",
    "class": "class-incremental: one head for all classes, and the task is not known at test time",
}
"""The three scenarios of van de Ven and Tolias (2019)."""


class TaskSequence(ABC):
    """Tasks that come one after another."""

    shape: ClassVar[tuple[int, ...]]
    heads: tuple[int, ...] = (10,)  # classes of each head of the network
    length: int | None = None  # tasks there are; None: as many as are asked for
    scenarios: tuple[str, ...] = ("domain",)  # the first is the default

    def __init__(self, tasks: int | None = None, *, seed: int = 0, scenario: str | None = None) -> None:
        self.seed = seed
        self.scenario = scenario or self.scenarios[0]
        if self.scenario not in self.scenarios:
            raise LimpetError(f"scenario must be one of {', '.join(self.scenarios)} here, not {scenario!r}")
        self.tasks = positive_whole("tasks", tasks if tasks is not None else self.length or 10)
        if self.length is not None and self.tasks > self.length:
            raise LimpetError(f"this sequence has {self.length} tasks, not {self.tasks}")
        if self.scenario == "class":
            warn(
                "class-incremental learning: regularisation alone does not solve it, because no task's data say how "
                "its classes compare with those of the others; a small replay buffer goes much further",
                LimpetWarning,
            )

    @abstractmethod
    def examples(self, number: int, split: str) -> Examples:
        """The data of task `number`, counted from 0; `split` is "train" or "test"."""

    def name(self, number: int) -> str:
        """What tables call the task."""
        return f"task {number + 1}"

    def head(self, number: int) -> int:
        """The head that the task uses: its own where there are several."""
        return number if len(self.heads) > 1 else 0


SEQUENCES: Registry[type[TaskSequence]] = Registry("task sequence")


@SEQUENCES.register("permuted-mnist")
class PermutedMNIST(TaskSequence):
    """MNIST, then MNIST with the pixels in another order for every task."""

    shape = (784,)

    def examples(self, number: int, split: str) -> Examples:
        """Task 0 is MNIST as it is."""
        pixels = _flat(images("mnist", split))
        if not number:
            return pixels
        generator = torch.Generator().manual_seed(1000 * (self.seed + 1) + number)
        return replace(pixels, inputs=pixels.inputs[:, torch.randperm(784, generator=generator)])


@SEQUENCES.register("disjoint-mnist")
class DisjointMNIST(TaskSequence):
    """The digits 0 to 4, then 5 to 9, with a ten-way classifier."""

    shape = (784,)
    length = 2
    scenarios = ("class",)

    def examples(self, number: int, split: str) -> Examples:
        """Half of the digits."""
        return _only(_flat(images("mnist", split)), range(5 * number, 5 * number + 5))

    def name(self, number: int) -> str:
        """The digits."""
        return f"digits {5 * number} to {5 * number + 4}"


class Split(TaskSequence):
    """A set of ten classes, two at a time."""

    source: ClassVar[str]
    length = 5
    scenarios = ("task", "domain", "class")

    def __init__(self, tasks: int | None = None, *, seed: int = 0, scenario: str | None = None) -> None:
        super().__init__(tasks, seed=seed, scenario=scenario)
        self.heads = {"task": (2,) * self.tasks, "domain": (2,), "class": (10,)}[self.scenario]

    def examples(self, number: int, split: str) -> Examples:
        """Two classes: as they are where one head serves all ten, as 0 and 1 otherwise."""
        two = _only(images(self.source, split), range(2 * number, 2 * number + 2))
        return two if self.scenario == "class" else replace(two, labels=two.labels - 2 * number)

    def name(self, number: int) -> str:
        """The classes."""
        return f"classes {2 * number} and {2 * number + 1}"


@SEQUENCES.register("split-mnist")
class SplitMNIST(Split):
    """0 and 1, 2 and 3, ..."""

    shape = (1, 28, 28)
    source = "mnist"


@SEQUENCES.register("split-cifar10")
class SplitCIFAR10(Split):
    """Aeroplanes and cars, birds and cats, ..."""

    shape = (3, 32, 32)
    source = "cifar10"


@SEQUENCES.register("vision")
class Vision(TaskSequence):
    """MNIST, notMNIST, Fashion-MNIST, SVHN, CIFAR-10: 32x32 in three channels, a head for each."""

    shape = (3, 32, 32)
    length = 5
    scenarios = ("task",)
    sources = (
        ("MNIST", "mnist"),
        ("notMNIST", "notmnist"),
        ("Fashion-MNIST", "fashion_mnist"),
        ("SVHN", "svhn"),
        ("CIFAR-10", "cifar10"),
    )

    def __init__(self, tasks: int | None = None, *, seed: int = 0, scenario: str | None = None) -> None:
        super().__init__(tasks, seed=seed, scenario=scenario)
        self.heads = (10,) * self.tasks

    def examples(self, number: int, split: str) -> Examples:
        """One of the five sets."""
        return _coloured(images(self.sources[number][1], split))

    def name(self, number: int) -> str:
        """The set."""
        return self.sources[number][0]


def _flat(examples: Examples) -> Examples:
    return replace(examples, inputs=examples.inputs.flatten(1))


def _only(examples: Examples, classes: range) -> Examples:
    return examples.take((examples.labels >= classes[0]) & (examples.labels <= classes[-1]))


def _coloured(examples: Examples) -> Examples:
    """Padded with zeros to 32x32, grey repeated over three channels (section 4.3 of the paper)."""
    pad = (32 - examples.inputs.shape[-1]) // 2
    return replace(examples, inputs=F.pad(examples.inputs, (pad,) * 4).expand(-1, 3, -1, -1).contiguous())


def experiment_key(experiment: str, tasks: int | None, scenario: str | None) -> str:
    """What results call an experiment: "permuted-mnist-50", "vision", "split-mnist-class"."""
    kind = SEQUENCES[experiment]
    parts = [experiment]
    if scenario is not None and scenario != kind.scenarios[0]:
        parts.append(scenario)
    if tasks is not None and tasks != kind.length:
        parts.append(str(tasks))
    return "-".join(parts)
