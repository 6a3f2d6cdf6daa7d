"""How a model is measured while it is trained with a method, and while it is moved afterwards."""

from __future__ import annotations

import argparse
import json
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

import limpet
from limpet.protection.recorder import InputRecorder
from retention.compare import RATIOS, decoded, encoded
from retention.method import After, During
from retention.pair import Pair
from retention.training import DIAGONAL, Training

FARTHEST = 1.02 * RATIOS[-1]
"""A path is followed until the new loss is this multiple of that of plain training."""


class Bench(Training):
    """A pair and a seed, with what is measured.

    Args:
        options: The command line.
        name: The name of the pair.
        pair: What is learned.
        seed: The seed of the training.
    """

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        super().__init__(options.work, pair, seed)
        self.name = name

    # what a suite defines

    @abstractmethod
    def new_loss(self, model: Any) -> float:
        """The loss on held-out new examples."""

    @abstractmethod
    def lost(self, model: Any) -> list[float]:
        """What is lost, on every row of a test set."""

    def others(self, _: Any) -> dict[str, float]:
        """The loss on other data, which takes long."""
        return {}

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

    def memory(self, model: Any) -> Any:
        """A memory of the model before, made once."""
        return self._stored_memory("kronecker", model)

    def diagonal_memory(self, model: Any) -> Any:
        """A memory with the diagonal Fisher alone, of strength 1, made once."""
        return self._stored_memory("diagonal", model, **DIAGONAL)

    def _stored_memory(self, name: str, model: Any, **settings: Any) -> Any:
        path = Path(f"{self.memories}-{name}.safetensors")
        costs = path.with_suffix(".json")
        if not costs.exists():
            with self.preparing():
                self.consolidate(**settings).save(path)
            costs.write_text(json.dumps(self.kept | {"megabytes": round(path.stat().st_size / 1e6, 1)}))
        self.kept = json.loads(costs.read_text())
        return limpet.load(path, model)

    def recorded(self) -> list[Any]:
        found: list[Any] = torch.load(self.path("plain.pt"), weights_only=True)
        return found

    def stored(self, name: str) -> bool:
        """Whether what a method has trained is still there."""
        return any(self.path(f"{name}{ending}").exists() for ending in ("", ".weights.pt"))

    def path(self, name: str) -> Path:
        """Where what a method has trained is stored."""
        return self.work / f"{self.name} {self.seed} {name}"

    # what is run

    def train(self, method: During, value: float) -> dict[str, Any]:
        """Train with a method; the trained model is stored.

        Returns:
            The record: its curve over steps, CPU seconds without those of measuring and of making a memory, what it
            keeps, and so on.
        """
        model, plain = self.fresh(method, value), method.name == "plain"
        self.kept, self.prepared = {}, 0.0
        recorder, curve, paused = InputRecorder(model), [], 0.0
        found = {"before": self.measured(model) | {"others": self.others(model)}} if plain else {}

        def measure(step: int) -> None:
            nonlocal paused
            if step in self.pair.moments:
                start = time.process_time()
                curve.append({"step": step, **self.measured(model)})
                print(f"{method.name} {value}: {_short(curve[-1])}", flush=True)
                paused += time.process_time() - start

        begin = time.process_time()
        if plain:
            recorder.start()
        self.fit(model, method, value, measure)
        recorder.stop()
        seconds = time.process_time() - begin - paused - self.prepared
        curve[-1]["others"] = self.others(model)
        if plain:
            torch.save(recorder.batches, self.path("plain.pt"))
        if method.wrapped is None:
            self.save(model, method.name)  # at last, because `stored` looks for it
        return {"value": value, "seconds": round(seconds), "curve": curve, **found, "kept": self.kept}

    def move(self, method: After, trained: str, plain: float) -> dict[str, Any]:
        """Apply a method to a trained model.

        Args:
            method: The method.
            trained: The name of the method that it was trained with.
            plain: The new loss of plain training.

        Returns:
            The record: its curve, CPU seconds without those of measuring and of making a memory, and what it keeps. The
            other data are measured at the point that is nearest to the middle one of the compared losses.
        """
        model = self.trained(trained)
        self.kept, self.prepared = {}, 0.0
        curve: list[dict[str, Any]] = []
        begin = time.process_time()
        with method.path(self, model) as go:
            seconds = time.process_time() - begin - self.prepared
            for setting in method.settings:
                begin = time.process_time()
                go(setting)
                seconds += time.process_time() - begin
                curve.append({"setting": setting, **self.measured(model)})
                print(f"{trained}, then {method.name}: {_short(curve[-1])}", flush=True)
                if curve[-1]["new"] > FARTHEST * plain:
                    break
            nearest = min(curve, key=lambda point: abs(point["new"] / plain - RATIOS[1]))
            go(nearest["setting"])
            nearest["others"] = self.others(model)
        return {"seconds": round(seconds), "curve": curve, "kept": self.kept}

    def measured(self, model: Any) -> dict[str, Any]:
        """The loss on the new data, and what is lost."""
        model.eval()
        return {"new": round(self.new_loss(model), 5), "lost": encoded(self.lost(model))}


def _short(point: dict[str, Any]) -> dict[str, Any]:
    return point | {"lost": round(float(decoded(point["lost"]).mean()), 4)}
