"""A memory in a checkpoint of torch.distributed.checkpoint, beside the model and the optimizer of a training.

    dcp.save({"model": model, "memory": memory}, checkpoint_id=folder)    # or dcp.async_save
    memory = limpet.load(folder, model)                                   # on any number of ranks

Every rank writes the blocks that it keeps and reads those that it is to keep. The checkpoint's own index is PyTorch's,
and a pickle: read checkpoints of your own trainings so, and publish memories as `memory.save(path)` writes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.store import State


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (Path(path) / ".metadata").is_file()


def read(folder: str | Path) -> State:
    """The state of the memory in a checkpoint. Its tensors are read when they are asked for, by each rank its own."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
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
    metadata = _read(folder, f"{prefixes[0]}metadata", "")
    if not isinstance(metadata, str):
        raise MemoryFileError(f"{Path(folder).name} holds something else than a memory")
    return {"metadata": metadata, "tensors": _Tensors(folder, f"{prefixes[0]}tensors.", entries)}


def _read(folder: str | Path, key: str, place: Any) -> Any:
    """One entry of a checkpoint, by this rank alone."""
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {key: place}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is read by one process, which is meant
        load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, folder: str | Path, prefix: str, entries: Mapping[str, Any]) -> None:
        self._folder, self._prefix = folder, prefix
        self._entries = {key.removeprefix(prefix): e for key, e in entries.items() if key.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor: Tensor = _read(self._folder, self._prefix + name, torch.empty(entry.size, dtype=entry.properties.dtype))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
