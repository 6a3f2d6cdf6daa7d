"""Training, validation and test data of the tasks of a run, on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from limpet.errors import LimpetError
from limpet.experiments.data import Examples, joined
from limpet.experiments.networks import build
from limpet.experiments.recipe import Recipe
from limpet.experiments.sequences import SEQUENCES


@dataclass(frozen=True)
class Lesson:
    """Training data of a task, or of all tasks that share a head.

    Args:
        head: Index of the head.
        train: Training examples.
        held_out: Validation examples.
    """

    head: int
    train: Examples
    held_out: Examples


class Lessons:
    """The tasks of a recipe. Test sets are cached; training sets are created on demand.

    Args:
        recipe: The recipe.
        device: Device of the data and networks.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.sequence = SEQUENCES[recipe.experiment](recipe.tasks, seed=recipe.seed, scenario=recipe.scenario)
        self._tests: dict[int, Examples] = {}

    def __len__(self) -> int:
        return self.sequence.tasks

    def names(self) -> list[str]:
        """Return the names of the tasks."""
        return [self.sequence.name(number) for number in range(len(self))]

    def network(self, number: int = 0) -> nn.Module:
        """Build the untrained network; the seed depends on the task, for methods that use a new network per task."""
        network, sequence = self.recipe.network, self.sequence
        seed = 1000 * self.recipe.seed + number
        return build(network.name, network.options, sequence.shape, sequence.heads, seed).to(self.device)

    def test(self, number: int) -> Examples:
        """Return the test set of a task."""
        if number not in self._tests:
            self._tests[number] = self._examples(number, "test").to(self.device)
        return self._tests[number]

    def lesson(self, number: int) -> Lesson:
        """Return the training set of a task, split into training and validation examples."""
        examples, held = self._examples(number, "train"), self.recipe.training.validation
        head = self.sequence.head(number)
        if not held:
            return Lesson(head, examples.to(self.device), examples.take(slice(0, 0)).to(self.device))
        if held >= len(examples):
            raise LimpetError(
                f"training.validation is {held}, but task {number + 1} has only {len(examples)} examples: reduce it"
            )
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(len(examples)))
        train, held_out = examples.take(order[held:]), examples.take(order[:held])
        return Lesson(head, train.to(self.device), held_out.to(self.device))

    def up_to(self, number: int) -> list[Lesson]:
        """Return all tasks up to this one, merging those that share a head so that batches mix them."""
        lessons = [self.lesson(i) for i in range(number + 1)]
        groups = [[one for one in lessons if one.head == head] for head in sorted({one.head for one in lessons})]
        return [
            Lesson(group[0].head, joined([one.train for one in group]), joined([one.held_out for one in group]))
            for group in groups
        ]

    def _examples(self, number: int, split: str) -> Examples:
        pixels = self.recipe.pixels
        return replace(self.sequence.examples(number, split), mean=pixels.mean, std=pixels.std)
