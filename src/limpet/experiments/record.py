"""What a run leaves behind: one folder, and in it one JSON record that figures and tables are made from."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_model
from torch import nn

from limpet.errors import LimpetError
from limpet.experiments import metrics
from limpet.experiments.recipe import Part, Recipe, checked, parse
from limpet.io import tensor_file
from limpet.methods.state_dict import Content
from limpet.version import __version__

CHECKPOINT_FORMAT = "limpet run checkpoint"
ROUND = 4  # decimals kept of percentages and nats: a test set of 10,000 has steps of 0.01


class Curve(Part):
    """Accuracy in the middle of training: after so many epochs of a task, on every task begun so far."""

    task: int
    epoch: int
    accuracy: list[float]


class Seconds(Part):
    """Where the time went, task by task."""

    training: list[float] = []
    curvature: list[float] = []
    evaluation: list[float] = []


class Record(Part):
    """The result of a run. Matrices have a row a task learned; a row may be empty where nothing was measured."""

    recipe: Recipe
    experiment: str  # what results call it: "permuted-mnist-50"
    environment: dict[str, Any] = {}
    names: list[str] = []
    untrained: list[float] = []
    accuracy: list[list[float | None]] = []
    nll: list[list[float | None]] = []
    calibration: list[list[float | None]] = []
    validation: list[float] = []
    curve: list[Curve] = []
    epochs: list[int] = []
    seconds: Seconds = Seconds()
    peak_memory_bytes: int = 0
    kept_bytes: int = 0
    parameters: int = 0
    metrics: dict[str, float | None] = {}

    @property
    def tasks(self) -> int:
        """Tasks learned so far."""
        return len(self.accuracy)

    @property
    def mean_accuracy(self) -> float:
        """Mean test accuracy over the tasks learned so far, in percent."""
        return metrics.average([row[: self.tasks] for row in self.accuracy])


def summarised(record: Record) -> dict[str, float | None]:
    """The numbers that people compare."""
    accuracy = [row[: record.tasks] for row in record.accuracy]
    last = metrics.last_row(accuracy)
    numbers = {
        "average_accuracy": metrics.average(accuracy),
        "first_task": last[0],
        "last_task": last[-1],
        "worst_task": min(last),
        "best_task": max(last),
        "forgetting": metrics.forgetting(accuracy),
        "backward_transfer": metrics.backward_transfer(accuracy),
        "forward_transfer": metrics.forward_transfer(record.accuracy, record.untrained),
        "nll": metrics.average([row[: record.tasks] for row in record.nll]),
        "calibration_error": metrics.average([row[: record.tasks] for row in record.calibration]),
    }
    if record.validation:
        numbers["validation_accuracy"] = sum(record.validation) / len(record.validation)
    return {name: None if value is None else round(value, ROUND) for name, value in numbers.items()}


def environment(threads: int, device: torch.device) -> dict[str, Any]:
    """What the figures depend on beside the recipe."""
    versions = {"limpet": __version__, "python": platform.python_version()}
    versions.update({name: metadata.version(name) for name in ("torch", "numpy", "safetensors")})
    return {
        "versions": versions,
        "command": " ".join(["limpet", *sys.argv[1:]]) if Path(sys.argv[0]).stem == "limpet" else None,
        "machine": platform.machine(),
        "system": platform.system(),
        "processors": os.cpu_count(),
        "threads": threads,
        "device": str(device),
    }


def peak_memory(device: torch.device) -> int:
    """The most bytes that the process (on CUDA: the device) has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class RunFolder:
    """Where a run is kept.

    recipe.yaml, run.json (environment, matrices, timings, metrics), memory.safetensors, model.safetensors,
    tensorboard/, and checkpoint.safetensors while it runs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.record = self.path / "run.json"
        self.memory = self.path / "memory.safetensors"
        self.model = self.path / "model.safetensors"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.tensorboard = self.path / "tensorboard"

    def begin(self, recipe: Recipe) -> None:
        """Make the folder and write the recipe."""
        self.path.mkdir(parents=True, exist_ok=True)
        written = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        write_text(self.recipe, written)

    def load_recipe(self) -> Recipe:
        """The recipe of the run."""
        if not self.recipe.is_file():
            raise LimpetError(f"{self.path} holds no run to go on with: there is no {self.recipe.name} in it")
        return checked(Recipe, parse(self.recipe.read_text(), str(self.recipe)), str(self.recipe))

    def save_record(self, record: Record) -> None:
        """Write run.json, whole or not at all."""
        write_text(self.record, compact_json(record.model_dump(mode="json")))

    def load_record(self) -> Record | None:
        """What the run came to; None where it has not ended."""
        return load_record(self.record) if self.record.is_file() else None

    def save_model(self, model: nn.Module) -> None:
        """Write the weights."""
        save_model(model, str(self.model))

    def save_checkpoint(self, content: Content) -> None:
        """Write the checkpoint, whole or not at all."""
        tensor_file.write(self.checkpoint, CHECKPOINT_FORMAT, content.metadata, content.tensors)

    def load_checkpoint(self) -> Content | None:
        """The last checkpoint, if there is one."""
        if not self.checkpoint.is_file():
            return None
        return Content(*tensor_file.read(self.checkpoint, CHECKPOINT_FORMAT))


def load_record(path: Path) -> Record:
    """A record from its JSON file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LimpetError(f"{path} is not a record of a run: {error}") from error
    return checked(Record, values, str(path))


def compact_json(values: Any) -> str:
    """JSON with one line for every row of a matrix: readable, and small."""
    return _dumped(values, 0) + "\n"


def _dumped(value: Any, depth: int) -> str:
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(str(key))}: {_dumped(item, depth + 1)}" for key, item in value.items()]
        inner = f",\n{pad}".join(items)
        return f"{{\n{pad}{inner}\n{pad[2:]}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        inner = f",\n{pad}".join(_flat(item) for item in value)
        return f"[\n{pad}{inner}\n{pad[2:]}]"
    return _flat(value)


def _flat(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with tensor_file.whole(path) as temporary:
        temporary.write_text(text)
