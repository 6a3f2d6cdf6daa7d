"""Inspect a memory file without the model it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.curvature.privacy import Privacy
from limpet.errors import finite_number
from limpet.forgetting.loss_curve import TaskHistory
from limpet.io import tensor_file
from limpet.methods import memory_file, state_header
from limpet.methods.private import restored
from limpet.posterior.summary import described
from limpet.precision import STRUCTURES, Precision
from limpet.precision.linalg import widened


@dataclass(frozen=True)
class BlockInspection:
    """Summary of one block.

    Attributes:
        name: Name of the block.
        kind: Kinds of its layers, joined by "+", or "direct" for a per-sample block.
        structure: Structure of its precision.
        shape: Shape of the block as a matrix, the bias as one more column.
        nbytes: Bytes of its tensors.
        tasks: Number of tasks consolidated into it.
        decided: Fraction of its directions determined by the data rather than by the prior, the mean of
            D / (D + prior) over the eigenvalues D.
        stakes: Predicted increase of the old loss in each eigendirection if the weights were replaced by others of the
            same scale, v D / N in nats per example with v the mean square of the weights; in descending order.
    """

    name: str
    kind: str
    structure: str
    shape: tuple[int, ...]
    nbytes: int
    tasks: int
    decided: float
    stakes: Tensor

    @property
    def at_stake(self) -> float:
        """Predicted increase of the old loss if the block's weights were replaced by others of the same scale."""
        return float(self.stakes.sum())


@dataclass(frozen=True)
class Inspection:
    """Content of a memory file.

    Attributes:
        settings: Settings of the memory, as stored in the file.
        library: Version of limpet that wrote the file.
        blocks: Summary of every block.
        history: Record of the consolidated tasks.
        sha256: SHA-256 of the file, for `limpet.load(..., sha256=)`.
        privacy: Budget of differential privacy of every task, None where there is none.
    """

    settings: Mapping[str, Any]
    library: str
    blocks: list[BlockInspection]
    history: TaskHistory
    sha256: str
    privacy: tuple[Privacy | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Total bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)


def inspect(path: str | Path) -> Inspection:
    """Read a memory file without building its model.

    Args:
        path: A file written by `memory.save`.

    Returns:
        The settings, blocks and task history of the memory.

    Raises:
        MemoryFileError: If the file is not a limpet memory, or is corrupted.

    Examples:
        >>> import tempfile, limpet
        >>> model = torch.nn.Linear(3, 2)
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     memory.save(f"{folder}/memory.safetensors")
        ...     found = inspect(f"{folder}/memory.safetensors")
        >>> found.settings["method"], [block.shape for block in found.blocks]
        ('online-laplace', [(2, 4)])
    """
    content = state_header.Content.of(memory_file.read(path))
    with state_header.rejecting_damage():
        metadata = content.metadata
        settings = metadata["settings"]
        examples = int(settings["examples"])
        blocks = [_block(entry, content.tensors, examples) for entry in metadata["blocks"]]
        history = TaskHistory.restore(settings.get("history"))
        privacy = restored(state_header.Settings(content).list("privacy"), int(settings["tasks"]))
        digest = tensor_file.Tensors(Path(path)).sha256()
        return Inspection(settings, str(metadata["library"]), blocks, history, digest, privacy)


def _mean_square(entry: Mapping[str, Any], own: Mapping[str, Tensor]) -> float:
    """Mean square of the weights, estimated from the sketches of quantized ones, which are most of a block."""
    if "base" in entry:
        return finite_number("mean_square", entry["mean_square"])
    if "quantized" in entry:
        numbers = [number for sketch in entry["quantized"].values() for number in sketch]
        return finite_number("mean_square", sum(number * number for number in numbers) / len(numbers))
    return float(widened(own["mean"]).square().mean())


def _block(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], examples: int) -> BlockInspection:
    prefix = f"{entry['name']}/"
    own = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
    kept = {key.removeprefix("precision/"): t for key, t in own.items() if key.startswith("precision/")}
    shape = torch.Size(entry["shape"])
    precision: Precision = STRUCTURES[entry["structure"]].restore(shape, kept, entry["precision"])
    precision.check()
    spectrum = precision.spectrum()
    total, fisher = widened(spectrum.total), widened(spectrum.fisher)
    square = _mean_square(entry, own)
    decided = (total / (total + spectrum.prior)).nan_to_num(0).mean()
    return BlockInspection(
        name=entry["name"],
        kind=entry["kind"],
        structure=described(precision),
        shape=tuple(shape),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in own.values()),
        tasks=int(entry["tasks"]),
        decided=float(decided),
        stakes=(square * fisher.flatten() / max(examples, 1)).sort(descending=True).values,
    )
