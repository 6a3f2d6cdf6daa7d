"""A memory in a checkpoint of torch.distributed.checkpoint, beside the model and the optimizer of a training.

    dcp.save({"model": model, "memory": memory}, checkpoint_id=folder)    # or dcp.async_save
    memory = limpet.load(folder, model)                                   # on any number of ranks

Every rank writes the blocks that it keeps and reads those that it is to keep. To publish a memory, write it by
`memory.save(path)`: checkpoints are for one's own trainings.
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
"""The file that every such checkpoint has."""


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (Path(path) / INDEX).is_file()


def read(folder: str | Path) -> State:
    """The state of the memory in a checkpoint. Its tensors are read when they are asked for, by each rank its own."""
    from limpet.io.dcp_reader import Reader  # torch.distributed.checkpoint takes long to import

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
            f"{Path(folder).name} holds {found}: save one, dcp.save({{'memory': memory, ...}}, checkpoint_id=...)"
        )
    metadata = reader.read(f"{prefixes[0]}metadata", "")
    if not isinstance(metadata, str):
        raise MemoryFileError(f"{Path(folder).name} holds something else than a memory")
    return {"metadata": metadata, "tensors": _Tensors(reader, f"{prefixes[0]}tensors.")}


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix
        self._entries = {key.removeprefix(prefix): e for key, e in reader.entries.items() if key.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        place = torch.empty(entry.size, dtype=entry.properties.dtype)
        tensor: Tensor = self._reader.read(self._prefix + name, place)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
