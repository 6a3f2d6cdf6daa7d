"""What all suites share: how a model is trained with a method, and what methods may use on the way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import limpet
from limpet.forgetting.repair import Repair
from limpet.methods.laplace import REPAIRED_WITH
from retention.method import During
from retention.pair import Pair
from retention.update import Layer

KEPT = 0.05
"""Size of the pool for replay, relative to the number of new examples."""

DIAGONAL = {"structure": "diagonal", "strength": 1.0, "prior_precision": 1e-3}
"""Settings of a memory with the diagonal Fisher alone. The prior stays small at all strengths."""


class Training(ABC):
    """The training on new examples, for a seed.

    Args:
        work: Where models and memories are kept.
        pair: What is learned.
        seed: The seed.
    """

    examples: int

    kept: dict[str, Any]
    """What a method has kept from before: its `megabytes`, and the `seconds` of making it."""

    draws: torch.Generator
    """What a run draws its old examples with."""

    prepared: float
    """CPU seconds that this run spent on making it."""

    def __init__(self, work: Path, pair: Pair, seed: int) -> None:
        self.work, self.pair, self.seed = work, pair, seed
        self.kept, self.prepared = {}, 0.0

    @abstractmethod
    def fresh(self, method: During, value: float) -> Any:
        """The model before training, with what trains."""

    @abstractmethod
    def optimizer(self, model: Any, rate: float) -> tuple[Any, Any]:
        """The optimizer and the schedule of its learning rate."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Any:
        """A batch of new examples."""

    @abstractmethod
    def forward(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss on a batch, and the outputs."""

    def rehearsed(self) -> list[Tensor]:
        """Rows for self-rehearsal, of a suite with a language model."""
        raise NotImplementedError

    @abstractmethod
    def distilled(self, model: Any, batch: Any, outputs: Tensor) -> Tensor:
        """KL(before || now) of the old outputs on a new batch, per example."""

    @abstractmethod
    def old_loss(self, model: Any, share: float) -> Tensor:
        """The sum of the losses of a few old examples, from a pool of this share of the new ones' number."""

    @abstractmethod
    def updates(self, model: Any) -> list[Layer]:
        """What training has changed."""

    @abstractmethod
    def displaced(self, model: Any) -> Tensor:
        """The squared distance of the weights from where they were, as a function of what trains."""

    @abstractmethod
    def memory(self, model: Any) -> Any:
        """A memory of the model before, for this model."""

    @abstractmethod
    def diagonal_memory(self, model: Any) -> Any:
        """A memory with the diagonal Fisher alone, of strength 1."""

    @abstractmethod
    def recorded(self) -> list[Any]:
        """The inputs of plain training that a protected run records."""

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Time what a method does with the model before, once for all that the model may learn later."""
        begin = time.process_time()
        yield
        self.prepared = time.process_time() - begin
        self.kept["seconds"] = round(self.prepared)

    def set_mode(self, model: Any) -> None:
        """Set the mode of the model, before every step."""
        model.train()

    def repaired(self, model: Any, **options: Any) -> Repair:
        """The model after a repair with the inputs that `memory.protect` would have recorded."""
        limit = min(self.examples, REPAIRED_WITH)
        return limpet.repair(model, self.memory(model), self.recorded(), examples=self.examples, limit=limit, **options)

    def fit(self, model: Any, method: During, value: float, then: Callable[[int], None] = lambda _: None) -> None:
        """Train a model with a method.

        Args:
            model: The model, from `fresh`.
            method: The method.
            value: The value of its setting.
            then: Called after every step, with its number.
        """
        optimizer, schedule = self.optimizer(model, method.rate(self.pair, value))
        self.draws = torch.Generator().manual_seed(100 + self.seed)
        generator = torch.Generator().manual_seed(2 + self.seed)
        extra = None if method.extra is None else method.extra(self, model, value)
        with method.protect(self, model, optimizer, value):
            for step in range(1, self.pair.steps + 1):
                self.set_mode(model)
                batch = self.batch(generator)
                optimizer.zero_grad()
                loss, outputs = self.forward(model, batch)
                torch.autograd.backward(loss + (0.0 if extra is None else extra(batch, outputs)))
                optimizer.step()
                schedule.step()
                then(step)
