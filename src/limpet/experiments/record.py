"""Output of a run: its folder, and the JSON record from which figures and tables are made."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from limpet.errors import LimpetError
from limpet.experiments import metrics
from limpet.experiments.recipe import Part, Recipe, checked, parse
from limpet.io import tensor_file
from limpet.io.atomic import atomic_write
from limpet.io.atomic import write_text as write_text
from limpet.methods.state_dict import Content
from limpet.version import __version__

CHECKPOINT_FORMAT = "limpet run checkpoint"
ROUND = 4  # decimals of percentages and nats; accuracies on 10,000 test examples are multiples of 0.01


class Curve(Part):
    """Accuracy on every task so far, after an epoch of the current one."""

    task: int
    epoch: int
    accuracy: list[float]


class Seconds(Part):
    """Wall time in seconds, per task."""

    training: list[float] = []
    curvature: list[float] = []
    evaluation: list[float] = []


class Record(Part):
    """Result of a run.

    Matrices have one row per task trained and one column per task tested; rows without measurements are empty.

    Attributes:
        recipe: The recipe of the run.
        experiment: Name of the experiment in results, such as "permuted-mnist-50".
        environment: Versions, hardware and command line.
        names: Names of the tasks.
        untrained: Accuracy of the untrained network on each task, in percent.
        accuracy: Matrix of test accuracies, in percent.
        nll: Matrix of negative log-likelihoods, in nats.
        calibration: Matrix of expected calibration errors, in percent.
        validation: Final validation accuracy on each task, if data were held out.
        curve: Accuracies during training, if they were tracked.
        epochs: Number of epochs trained on each task.
        seconds: Wall time per task.
        peak_memory_bytes: Peak memory of the process, or of the CUDA device.
        kept_bytes: Bytes stored by the method in addition to the network.
        parameters: Number of trainable parameters.
        metrics: Summary metrics of the finished run.
    """

    recipe: Recipe
    experiment: str
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
        """Number of tasks learned so far."""
        return len(self.accuracy)

    @property
    def mean_accuracy(self) -> float:
        """Mean test accuracy over the tasks learned so far, in percent."""
        return metrics.average([row[: self.tasks] for row in self.accuracy])


def summarised(record: Record) -> dict[str, float | None]:
    """Compute the summary metrics of a finished run."""
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
    """Describe the software and hardware of the run.

    Args:
        threads: Number of PyTorch threads.
        device: Device of the run.

    Returns:
        Versions, command line, machine and device.
    """
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
    """Return the peak memory of the process (on CUDA: of the device) in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class RunFolder:
    """Folder of a run.

    It contains recipe.yaml, run.json (environment, matrices, timings, metrics), memory.safetensors, model.safetensors,
    tensorboard/, and during the run checkpoint.safetensors.

    Args:
        path: Path of the folder.
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
        """Create the folder and write the recipe."""
        self.path.mkdir(parents=True, exist_ok=True)
        written = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        write_text(self.recipe, written)

    def load_recipe(self) -> Recipe:
        """Read the recipe of the run."""
        if not self.recipe.is_file():
            raise LimpetError(f"{self.path} does not contain a run: {self.recipe.name} not found")
        return checked(Recipe, parse(self.recipe.read_text(), str(self.recipe)), str(self.recipe))

    def save_record(self, record: Record) -> None:
        """Write run.json atomically."""
        write_text(self.record, compact_json(record.model_dump(mode="json")))

    def load_record(self) -> Record | None:
        """Read the record, or return None if the run has not finished."""
        return load_record(self.record) if self.record.is_file() else None

    def save_model(self, model: nn.Module) -> None:
        """Write the weights of the network atomically."""
        with atomic_write(self.model, size=sum(t.nbytes for t in model.state_dict().values())) as temporary:
            try:
                save_model(model, str(temporary))
            except SafetensorError as error:  # it has no errors of the operating system
                found = re.search(r"os error (\d+)", str(error))
                number = errno.EIO if found is None else int(found[1])
                raise OSError(number, os.strerror(number)) from error

    def save_checkpoint(self, content: Content) -> None:
        """Write the checkpoint atomically."""
        tensor_file.write(self.checkpoint, CHECKPOINT_FORMAT, content.metadata, content.tensors)

    def load_checkpoint(self) -> Content | None:
        """Read the last checkpoint, or return None if there is none."""
        if not self.checkpoint.is_file():
            return None
        return Content(*tensor_file.read(self.checkpoint, CHECKPOINT_FORMAT))


def load_record(path: Path) -> Record:
    """Read a record from its JSON file."""
    return _parsed(_text(path), str(path))


def load_records(path: Path) -> list[Record]:
    """Read the records of a .jsonl file, one per line."""
    lines = enumerate(_text(path).splitlines(), start=1)
    return [_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise LimpetError(f"{path} is not a valid run record: {error}") from error


def _parsed(text: str, where: str) -> Record:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise LimpetError(f"{where} is not a valid run record: {error}") from error
    return checked(Record, values, where)


def compact_json(values: Any) -> str:
    """Format values as JSON with one line per matrix row."""
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
