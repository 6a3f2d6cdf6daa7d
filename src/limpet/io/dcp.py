"""Read a memory from a torch.distributed checkpoint that also holds the model and the optimizer.

    dcp.save({"model": model, "memory": memory}, checkpoint_id=folder)    # or dcp.async_save
    memory = limpet.load(folder, model)                                   # on any number of ranks

Every rank writes the blocks it owns and reads the blocks it will own. Checkpoints are meant for resuming your own
training runs; to publish a memory, use `memory.save(path)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.io.state import State

if TYPE_CHECKING:
    from limpet.io.dcp_reader import Reader

INDEX = ".metadata"
"""Name of the index file that every torch.distributed checkpoint contains."""


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a torch.distributed checkpoint."""
    return (Path(path) / INDEX).is_file()


def read(folder: str | Path) -> State:
    """Read the state of the memory in a checkpoint.

    Args:
        folder: The checkpoint folder.

    Returns:
        The state. Its tensors are read lazily, so each rank reads only those it accesses.

    Raises:
        MemoryFileError: If the checkpoint does not contain exactly one memory.
    """
    from limpet.io.dcp_reader import Reader  # torch.distributed.checkpoint is slow to import

    reader = Reader(folder, INDEX)
    entries = reader.entries
    prefixes = [
        key.removesuffix("metadata")
        for key in entries
        if key.rpartition(".")[2] == "metadata"
        and any(other.startswith(f"{key.removesuffix('metadata')}tensors.") for other in entries)
    ]
    if len(prefixes) != 1:
        found = "no memory" if not prefixes else f"{len(prefixes)} memories"
        raise MemoryFileError(
            f"{Path(folder).name} contains {found}, but must contain exactly one: save it with "
            "dcp.save({'memory': memory, ...}, checkpoint_id=...)"
        )
    metadata = reader.read(f"{prefixes[0]}metadata", "")
    if not isinstance(metadata, str):
        raise MemoryFileError(f"{Path(folder).name} does not contain a limpet memory: its metadata is not a string")
    return {"metadata": metadata, "tensors": _Tensors(reader, f"{prefixes[0]}tensors.")}


class _Tensors(Mapping[str, Tensor]):
    """The tensors under a prefix of a checkpoint, each read when it is accessed."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix
        self._entries = {key.removeprefix(prefix): e for key, e in reader.entries.items() if key.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        buffer = torch.empty(entry.size, dtype=entry.properties.dtype)
        tensor: Tensor = self._reader.read(self._prefix + name, buffer)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
