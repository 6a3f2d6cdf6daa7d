"""What all suites share: how a model is trained with a method, moved afterwards, and measured on the way."""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import limpet
from limpet.forgetting.repair import Repair
from limpet.methods.laplace import REPAIRED_WITH
from limpet.protection.recorder import InputRecorder
from retention.compare import RATIOS
from retention.method import After, During
from retention.update import Layer

KEPT = 0.05
"""Size of the pool for replay, relative to the number of new examples."""

FARTHEST = 1.02 * RATIOS[-1]
"""A path is followed until the new loss is this multiple of that of plain training."""


@dataclass(frozen=True)
class Pair:
    """What is learned, and how.

    Attributes:
        new: The name of the new data.
        others: The names of other data that the model is to keep its loss on.
        steps: Number of steps.
        rate: Largest learning rate.
        moments: Steps at which a training run is measured.
        full: Train all weights instead of adapters.
    """

    new: str
    others: tuple[str, ...] = ()
    steps: int = 300
    rate: float = 2e-3
    moments: tuple[int, ...] = (100, 150, 200, 250, 300)
    full: bool = False


class Bench(ABC):
    """A pair and a seed.

    Args:
        options: The command line.
        name: The name of the pair.
        pair: What is learned.
        seed: The seed of the training.
    """

    examples: int

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        self.work: Path = options.work
        self.name, self.pair, self.seed = name, pair, seed
        self.draws = torch.Generator().manual_seed(100 + seed)

    # what a suite defines

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

    @abstractmethod
    def new_loss(self, model: Any) -> float:
        """The loss on held-out new examples."""

    @abstractmethod
    def lost(self, model: Any) -> list[float]:
        """What is lost, on every row of a test set."""

    def others(self, _: Any) -> dict[str, float]:
        """The loss on other data, which takes long."""
        return {}

    def rehearsed(self) -> list[Tensor]:
        """Rows for self-rehearsal, of a suite with a language model."""
        raise NotImplementedError

    @abstractmethod
    def distilled(self, model: Any, batch: Any, outputs: Tensor) -> Tensor:
        """KL(before || now) of the old outputs on a new batch, per example."""

    @abstractmethod
    def old_loss(self, model: Any, share: float) -> Tensor:
        """The loss on a few old examples, from a pool of this share of the new ones' number."""

    @abstractmethod
    def updates(self, model: Any) -> list[Layer]:
        """What training has changed."""

    @abstractmethod
    def displaced(self, model: Any) -> Tensor:
        """The squared distance of the weights from where they were, as a function of what trains."""

    @abstractmethod
    def consolidate(self, **settings: Any) -> limpet.Memory:
        """Make a memory of the model before, with other settings than the suite's."""

    @abstractmethod
    def save(self, model: Any, name: str) -> None:
        """Store a trained model."""

    @abstractmethod
    def trained(self, name: str) -> Any:
        """The stored model."""

    # what methods use

    @property
    def memories(self) -> Path:
        """The beginning of the names of memory files."""
        return Path(self.work / "memory")

    def path(self, name: str) -> Path:
        """Where what a method has trained is stored."""
        return self.work / f"{self.name} {self.seed} {name}"

    def memory(self, model: Any) -> Any:
        """A memory of the model before, made once."""
        return self._stored_memory("kronecker", model)

    def diagonal_memory(self, model: Any, strength: float) -> Any:
        """A memory with the diagonal Fisher alone, made once for every strength."""
        return self._stored_memory(f"diagonal-{strength:g}", model, structure="diagonal", strength=strength)

    def _stored_memory(self, name: str, model: Any, **settings: Any) -> Any:
        path = Path(f"{self.memories}-{name}.safetensors")
        if not path.exists():
            begin = time.perf_counter()
            self.consolidate(**settings).save(path)
            print(f"{path}: {time.perf_counter() - begin:.0f} s, {path.stat().st_size / 1e6:.0f} MB", flush=True)
        return limpet.load(path, model)

    def repaired(self, model: Any, **options: Any) -> Repair:
        """The model after a repair with the inputs that `memory.protect` would have recorded."""
        batches = torch.load(self.path("plain.pt"), weights_only=True)
        limit = min(self.examples, REPAIRED_WITH)
        return limpet.repair(model, self.memory(model), batches, examples=self.examples, limit=limit, **options)

    # what is run

    def train(self, method: During, value: float) -> dict[str, Any]:
        """Train with a method; the trained model is stored.

        Returns:
            The record: its curve over steps, seconds without those of measuring, and so on.
        """
        model, pair, plain = self.fresh(method, value), self.pair, method.name == "plain"
        optimizer, schedule = self.optimizer(model, pair.rate * method.rate(value))
        generator = torch.Generator().manual_seed(2 + self.seed)
        extra = None if method.extra is None else method.extra(self, model, value)
        recorder, curve, paused = InputRecorder(model), [], 0.0
        found = {"before": self.measured(model) | {"others": self.others(model)}} if plain else {}
        begin = time.perf_counter()
        if plain:
            recorder.start()
        with method.protect(self, model, optimizer, value):
            for step in range(1, pair.steps + 1):
                self.set_mode(model)
                batch = self.batch(generator)
                optimizer.zero_grad()
                loss, outputs = self.forward(model, batch)
                torch.autograd.backward(loss + (0.0 if extra is None else extra(batch, outputs)))
                optimizer.step()
                schedule.step()
                if step in pair.moments:
                    start = time.perf_counter()
                    curve.append({"step": step, **self.measured(model)})
                    print(f"{method.name} {value}: {_short(curve[-1])}", flush=True)
                    paused += time.perf_counter() - start
        recorder.stop()
        seconds = time.perf_counter() - begin - paused
        curve[-1]["others"] = self.others(model)
        if method.wrapped is None:
            self.save(model, method.name)
        if plain:
            torch.save(recorder.batches, self.path("plain.pt"))
        return {"value": value, "seconds": round(seconds), "curve": curve, **found}

    def move(self, method: After, trained: str, plain: float) -> dict[str, Any]:
        """Apply a method to a trained model.

        Args:
            method: The method.
            trained: The name of the method that it was trained with.
            plain: The new loss of plain training.

        Returns:
            The record: its curve, and seconds without those of measuring. The other data are measured at the point
            that is nearest to the middle one of the compared losses.
        """
        model = self.trained(trained)
        curve: list[dict[str, Any]] = []
        begin = time.perf_counter()
        with method.path(self, model) as go:
            seconds = time.perf_counter() - begin
            for setting in method.settings:
                begin = time.perf_counter()
                go(setting)
                seconds += time.perf_counter() - begin
                curve.append({"setting": setting, **self.measured(model)})
                print(f"{trained}, then {method.name}: {_short(curve[-1])}", flush=True)
                if curve[-1]["new"] > FARTHEST * plain:
                    break
            nearest = min(curve, key=lambda point: abs(point["new"] / plain - RATIOS[1]))
            go(nearest["setting"])
            nearest["others"] = self.others(model)
        return {"seconds": round(seconds), "curve": curve}

    def set_mode(self, model: Any) -> None:
        """Set the mode of the model, before every step."""
        model.train()

    def measured(self, model: Any) -> dict[str, Any]:
        """The loss on the new data, and what is lost."""
        model.eval()
        return {"new": round(self.new_loss(model), 5), "lost": [round(one, 5) for one in self.lost(model)]}


def _short(point: dict[str, Any]) -> dict[str, Any]:
    return point | {"lost": round(sum(point["lost"]) / len(point["lost"]), 4)}
