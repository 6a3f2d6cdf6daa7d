"""Output of a run: its folder, and the JSON record from which figures and tables are made."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from limpet.errors import LimpetError
from limpet.experiments import metrics
from limpet.experiments.recipe import Part, Recipe
from limpet.experiments.settings import checked, parse
from limpet.io import tensor_file
from limpet.io.atomic import atomic_write, write_text
from limpet.io.lock import folder_lock
from limpet.methods.state_header import Content
from limpet.version import __version__

CHECKPOINT_FORMAT = "limpet run checkpoint"
CHECKSUM = "sha256"
ROUND = 4  # decimals of percentages and nats; accuracies on 10,000 test examples are multiples of 0.01


Percent = Annotated[float, Field(ge=-1e6, le=1e6)]
Size = Annotated[int, Field(ge=0, lt=2**63)]


class Curve(Part):
    """Accuracy on every task so far, after an epoch of the current one."""

    task: int = Field(ge=0)
    epoch: int = Field(ge=0)
    accuracy: list[Percent]

    @model_validator(mode="after")
    def _check_length(self) -> Curve:
        if len(self.accuracy) != self.task + 1:
            raise ValueError(f"a point of the curve of task {self.task} has {len(self.accuracy)} accuracies")
        return self


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
    untrained: list[Percent] = []
    accuracy: list[list[Percent | None]] = []
    nll: list[list[float | None]] = []
    calibration: list[list[Percent | None]] = []
    validation: list[Percent] = []
    curve: list[Curve] = []
    epochs: list[Size] = []
    seconds: Seconds = Seconds()
    peak_memory_bytes: Size = 0
    kept_bytes: Size = 0
    parameters: Size = 0
    metrics: dict[str, float | None] = {}

    @field_validator("experiment")
    @classmethod
    def _check_name(cls, name: str) -> str:
        """The name is that of a folder in reports."""
        if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"{name[:80]!r} cannot be the name of an experiment, because it is that of a folder")
        return name

    @model_validator(mode="after")
    def _check_shapes(self) -> Record:
        """Reports rely on the shapes of the matrices."""
        tasks, names = len(self.accuracy), len(self.names)
        shapes = {tuple(map(len, matrix)) for matrix in (self.accuracy, self.nll, self.calibration)}
        lengths = {len(self.epochs), *(len(column) for column in self.seconds.model_dump().values())}
        rows = all(len(row) in (0, t + 1, min(t + 2, names)) for t, row in enumerate(self.accuracy))
        others = all(len(values) in (0, names) for values in (self.untrained, self.validation))
        curves = all(point.task < names for point in self.curve)
        if tasks > names or len(shapes) > 1 or lengths != {tasks} or not (rows and others and curves):
            raise ValueError("the matrices and lists of the record do not match in length")
        return self

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
    tensorboard/, and during the run checkpoint.safetensors and the lock of the process that writes to it.

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

    def lock(self, wait: float = 0.0) -> AbstractContextManager[None]:
        """Return a context in which no other process writes to the folder.

        Args:
            wait: Number of seconds to wait for another process to release it.
        """
        return folder_lock(self.path, wait=wait)

    def begin(self, recipe: Recipe) -> None:
        """Write the recipe. The folder is locked, and contains no run."""
        found = [path.name for path in (self.record, self.checkpoint, self.memory, self.model) if path.exists()]
        if found:
            raise LimpetError(
                f"{self.path} contains {found[0]} of a run whose {self.recipe.name} is missing: restore it, or choose "
                "another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.recipe, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    def tidy(self) -> None:
        """Delete temporary files of killed processes. The folder is locked, so no other process is writing them."""
        for path in (self.recipe, self.record, self.memory, self.model, self.checkpoint):
            for temporary in self.path.glob(f".{path.name}.*"):
                temporary.unlink(missing_ok=True)

    def load_recipe(self) -> Recipe:
        """Read the recipe of the run.

        Raises:
            LimpetError: If there is none, or it is damaged.
        """
        if not self.recipe.is_file():
            raise LimpetError(f"{self.path} does not contain a run: {self.recipe.name} not found")
        return checked(Recipe, parse(_text(self.recipe, "recipe"), str(self.recipe)), str(self.recipe))

    def save_record(self, record: Record) -> None:
        """Write run.json atomically."""
        write_text(self.record, compact_json(with_checksum(record.model_dump(mode="json"))))

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
    """Read a record from its JSON file.

    Raises:
        LimpetError: If the file is damaged.
    """
    return _finished(load_json(path, "run record"), str(path))


def load_records(path: Path) -> list[Record]:
    """Read the records of a .jsonl file, one per line.

    Raises:
        LimpetError: If a line is damaged.
    """
    records = []
    for number, line in enumerate(_text(path, "file of run records").split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            records.append(_finished(parse_json(line, where, "run record"), where))
    return records


def _finished(values: Any, where: str) -> Record:
    """Check the record of a finished run."""
    record = checked(Record, values, where)
    if not record.tasks or record.tasks != len(record.names) or None in record.accuracy[-1]:
        raise LimpetError(f"{where} is not the record of a finished run")
    if len(record.accuracy[-1]) != record.tasks:
        raise LimpetError(f"{where} does not contain the final accuracy on every task")
    return record


def _text(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LimpetError(f"{path} is not a valid {kind}: {error}") from error


def load_json(path: Path, kind: str) -> Any:
    """Read a JSON file that was written with `with_checksum`, or by an earlier version without a checksum.

    Args:
        path: The file.
        kind: What it is, for error messages.

    Returns:
        The values, without the checksum.

    Raises:
        LimpetError: If the file is damaged.
    """
    return parse_json(_text(path, kind), str(path), kind)


def parse_json(text: str, where: str, kind: str) -> Any:
    """Parse JSON and verify the checksum in it, if any.

    Args:
        text: The JSON.
        where: Its source, for error messages.
        kind: What it is, for error messages.

    Returns:
        The values, without the checksum.

    Raises:
        LimpetError: If the text is not valid JSON that can be written again, or does not match its checksum.
    """
    try:
        values = json.loads(text)
        digest = values.pop(CHECKSUM, None) if isinstance(values, dict) else None
        actual = _digest(values)
    except (ValueError, RecursionError) as error:
        raise LimpetError(f"{where} is not a valid {kind}: {error}") from error
    if digest is not None and digest != actual:
        raise LimpetError(
            f"{where} is damaged: its content does not match its checksum (if it was edited on purpose, remove the "
            f"entry {CHECKSUM!r})"
        )
    return values


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum over the values, which `parse_json` verifies."""
    return {**values, CHECKSUM: _digest(values)}


def _digest(values: Any) -> str:
    """SHA-256 of the values as JSON with sorted keys. Raises ValueError for NaN, infinity and invalid Unicode."""
    written = json.dumps(values, allow_nan=False, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


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
