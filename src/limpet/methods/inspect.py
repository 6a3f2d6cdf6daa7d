"""Look into a memory file without the model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.forgetting.loss_curve import TaskHistory
from limpet.methods import state_dict
from limpet.posterior.summary import described
from limpet.precision import STRUCTURES, Precision
from limpet.precision.linalg import widened


@dataclass(frozen=True)
class BlockInspection:
    """What is known of one block.

    `decided` is the share of its directions that the data decide rather than the prior, sum D / (D + prior), and
    `stakes` what a push towards other weights of the same size is predicted to cost in each direction, v D / N in nats
    per example with v the mean square of the weights: largest first.
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
        """The predicted rise of the old loss if the block were replaced by other weights of its size."""
        return float(self.stakes.sum())


@dataclass(frozen=True)
class Inspection:
    """A memory file: its settings, its blocks and the tasks that went into it."""

    settings: Mapping[str, Any]
    library: str
    blocks: list[BlockInspection]
    history: TaskHistory

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(block.nbytes for block in self.blocks)


def inspect(path: str | Path) -> Inspection:
    """What a memory file holds.

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
    content = state_dict.Content.of(state_dict.read(path))
    with state_dict.rejecting_damage():
        metadata = content.metadata
        settings = metadata["settings"]
        examples = int(settings["examples"])
        blocks = [_block(entry, content.tensors, examples) for entry in metadata["blocks"]]
        history = TaskHistory.restore(settings.get("history"))
        return Inspection(settings, str(metadata["library"]), blocks, history)


def _block(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], examples: int) -> BlockInspection:
    prefix = f"{entry['name']}/"
    own = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
    kept = {key.removeprefix("precision/"): t for key, t in own.items() if key.startswith("precision/")}
    shape = torch.Size(entry["shape"])
    precision: Precision = STRUCTURES[entry["structure"]].restore(shape, kept, entry["precision"])
    spectrum = precision.spectrum()
    total, fisher = widened(spectrum.total), widened(spectrum.fisher)
    square = float(widened(own["mean"]).square().mean())
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
