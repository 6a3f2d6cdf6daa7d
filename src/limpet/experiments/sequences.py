"""Task sequences. To add one, subclass `TaskSequence` and define `shape`, `heads` and `examples`.

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
    "task": "task-incremental: the task is known at test time and has its own head",
    "domain": "domain-incremental: all tasks share the same classes and one head",
    "class": "class-incremental: one head for all classes; the task is unknown at test time",
}
"""The three scenarios of van de Ven and Tolias (2019)."""


class TaskSequence(ABC):
    """A sequence of classification tasks.

    Args:
        tasks: Number of tasks; by default `length`, or 10 if the sequence is unlimited.
        seed: Seed of the tasks, where they are random.
        scenario: One of `scenarios`; by default the first.

    Attributes:
        shape: Shape of one input.
        heads: Number of classes of each head of the network.
        length: Number of tasks available; None if unlimited.
        scenarios: Supported scenarios, default first.

    Raises:
        LimpetError: If the sequence does not have that many tasks, or does not support the scenario.
    """

    shape: ClassVar[tuple[int, ...]]
    heads: tuple[int, ...] = (10,)
    length: int | None = None
    scenarios: tuple[str, ...] = ("domain",)

    def __init__(self, tasks: int | None = None, *, seed: int = 0, scenario: str | None = None) -> None:
        self.seed = seed
        self.scenario = scenario or self.scenarios[0]
        if self.scenario not in self.scenarios:
            raise LimpetError(
                f"scenario must be one of {', '.join(self.scenarios)} for this sequence, not {scenario!r}"
            )
        self.tasks = positive_whole("tasks", tasks if tasks is not None else self.length or 10)
        if self.length is not None and self.tasks > self.length:
            raise LimpetError(f"this sequence has {self.length} tasks, but {self.tasks} were requested")
        if self.scenario == "class":
            warn(
                "class-incremental learning: regularization alone does not solve it, because no task's data compare "
                "its classes with those of other tasks; consider a small replay buffer",
                LimpetWarning,
            )

    @abstractmethod
    def examples(self, number: int, split: str) -> Examples:
        """Return the data of a task.

        Args:
            number: Index of the task, from 0.
            split: "train" or "test".
        """

    def name(self, number: int) -> str:
        """Return the name of the task in tables."""
        return f"task {number + 1}"

    def head(self, number: int) -> int:
        """Return the index of the head that the task uses."""
        return number if len(self.heads) > 1 else 0


SEQUENCES: Registry[type[TaskSequence]] = Registry("task sequence")


@SEQUENCES.register("permuted-mnist")
class PermutedMNIST(TaskSequence):
    """MNIST, then MNIST with a different random permutation of the pixels per task."""

    shape = (784,)

    def examples(self, number: int, split: str) -> Examples:
        """Return MNIST with permuted pixels; task 0 is not permuted."""
        pixels = _flat(images("mnist", split))
        if not number:
            return pixels
        generator = torch.Generator().manual_seed(1000 * (self.seed + 1) + number)
        return replace(pixels, inputs=pixels.inputs[:, torch.randperm(784, generator=generator)])


@SEQUENCES.register("disjoint-mnist")
class DisjointMNIST(TaskSequence):
    """Digits 0 to 4, then 5 to 9, with a single ten-way classifier."""

    shape = (784,)
    length = 2
    scenarios = ("class",)

    def examples(self, number: int, split: str) -> Examples:
        """Return five of the ten digits."""
        return _only(_flat(images("mnist", split)), range(5 * number, 5 * number + 5))

    def name(self, number: int) -> str:
        """Return the digits of the task."""
        return f"digits {5 * number} to {5 * number + 4}"


class Split(TaskSequence):
    """A ten-class dataset, split into tasks of two classes."""

    source: ClassVar[str]
    length = 5
    scenarios = ("task", "domain", "class")

    def __init__(self, tasks: int | None = None, *, seed: int = 0, scenario: str | None = None) -> None:
        super().__init__(tasks, seed=seed, scenario=scenario)
        self.heads = {"task": (2,) * self.tasks, "domain": (2,), "class": (10,)}[self.scenario]

    def examples(self, number: int, split: str) -> Examples:
        """Return two classes, relabeled to 0 and 1 unless one head serves all ten."""
        two = _only(images(self.source, split), range(2 * number, 2 * number + 2))
        return two if self.scenario == "class" else replace(two, labels=two.labels - 2 * number)

    def name(self, number: int) -> str:
        """Return the classes of the task."""
        return f"classes {2 * number} and {2 * number + 1}"


@SEQUENCES.register("split-mnist")
class SplitMNIST(Split):
    """MNIST, two digits per task: 0 and 1, 2 and 3, ..."""

    shape = (1, 28, 28)
    source = "mnist"


@SEQUENCES.register("split-cifar10")
class SplitCIFAR10(Split):
    """CIFAR-10, two classes per task: airplanes and cars, birds and cats, ..."""

    shape = (3, 32, 32)
    source = "cifar10"


@SEQUENCES.register("vision")
class Vision(TaskSequence):
    """MNIST, notMNIST, Fashion-MNIST, SVHN, CIFAR-10 as 32x32 RGB images, one head each."""

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
        """Return one of the five datasets."""
        return _coloured(images(self.sources[number][1], split))

    def name(self, number: int) -> str:
        """Return the name of the dataset."""
        return self.sources[number][0]


def _flat(examples: Examples) -> Examples:
    return replace(examples, inputs=examples.inputs.flatten(1))


def _only(examples: Examples, classes: range) -> Examples:
    return examples.take((examples.labels >= classes[0]) & (examples.labels <= classes[-1]))


def _coloured(examples: Examples) -> Examples:
    """Pad with zeros to 32x32 and repeat grayscale over three channels (section 4.3 of the paper)."""
    pad = (32 - examples.inputs.shape[-1]) // 2
    return replace(examples, inputs=F.pad(examples.inputs, (pad,) * 4).expand(-1, 3, -1, -1).contiguous())


def experiment_key(experiment: str, tasks: int | None, scenario: str | None) -> str:
    """Return the name of an experiment in results, such as "permuted-mnist-50", "vision" or "split-mnist-class".

    Args:
        experiment: Name of the task sequence.
        tasks: Number of tasks, if given.
        scenario: Scenario, if given.

    Returns:
        The name, which omits defaults.
    """
    kind = SEQUENCES[experiment]
    parts = [experiment]
    if scenario is not None and scenario != kind.scenarios[0]:
        parts.append(scenario)
    if tasks is not None and tasks != kind.length:
        parts.append(str(tasks))
    return "-".join(parts)
