"""Read a memory from a torch.distributed checkpoint that also holds the model and the optimizer.

    dcp.save({"model": model, "memory": memory}, checkpoint_id=folder)    # or dcp.async_save
    memory = limpet.load(folder, model)                                   # on any number of ranks

Every rank writes the blocks it owns and reads the blocks it will own.

The index of a checkpoint is a pickle, and so is the description of each of its entries. None of them is unpickled:
`limpet.io.pickle_reader` reads what they say without importing or calling anything, and files outside of the folder are
not opened. The state of a memory has checksums of its own, which are verified when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.io import pickle_reader, torch_archive
from limpet.io.pickle_reader import Pairs, Record
from limpet.io.state import State

INDEX = ".metadata"
"""Name of the index file that every torch.distributed checkpoint contains."""
_CLASSES = "torch.distributed.checkpoint.metadata."
_LOCATION = "torch.distributed.checkpoint.filesystem._StorageInfo"


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
        MemoryFileError: If the checkpoint is damaged, or does not contain exactly one memory.
    """
    folder = Path(folder)
    locations = _index(folder)
    prefixes = [
        key.removesuffix("metadata")
        for key in locations
        if key.rpartition(".")[2] == "metadata"
        and any(other.startswith(f"{key.removesuffix('metadata')}tensors.") for other in locations)
    ]
    if len(prefixes) != 1:
        found = "no memory" if not prefixes else f"{len(prefixes)} memories"
        raise MemoryFileError(
            f"{folder.name} contains {found}, but must contain exactly one: save it with "
            "dcp.save({'memory': memory, ...}, checkpoint_id=...)"
        )
    metadata = locations[f"{prefixes[0]}metadata"].read(folder)
    if not isinstance(metadata, str):
        raise MemoryFileError(f"{folder.name} does not contain a limpet memory: its metadata is not a string")
    prefix = f"{prefixes[0]}tensors."
    own = {key.removeprefix(prefix): place for key, place in locations.items() if key.startswith(prefix)}
    return {"metadata": metadata, "tensors": _Tensors(folder, own)}


@dataclass(frozen=True)
class Location:
    """Where the bytes of an entry are.

    Attributes:
        file: Name of a file in the checkpoint folder.
        offset: Position of the first byte.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int

    def read(self, folder: Path) -> Tensor | str:
        """Read the entry; raises MemoryFileError if it is damaged, or lies outside of the folder."""
        path = folder / self.file
        try:
            inside = path.resolve(strict=True).parent == folder.resolve(strict=True)
            if not inside or not path.is_file():
                raise MemoryFileError(f"the index of {folder.name} refers to something that is not a file in it")
            with path.open("rb") as file:
                if self.offset + self.length > os.fstat(file.fileno()).st_size:
                    raise MemoryFileError(f"{self.file} is truncated")
                file.seek(self.offset)
                data = file.read(self.length)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
            raise MemoryFileError(f"{folder.name} is incomplete: {error}") from error
        return torch_archive.read(data)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read when it is accessed."""

    def __init__(self, folder: Path, locations: Mapping[str, Location]) -> None:
        self._folder, self._locations = folder, locations

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._locations[name].read(self._folder)
        if not isinstance(tensor, Tensor):
            raise MemoryFileError(f"{name} is not a tensor")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


def _index(folder: Path) -> dict[str, Location]:
    """Read where each entry of a checkpoint is."""
    path = folder / INDEX
    try:
        if path.stat().st_size > pickle_reader.MAX_BYTES:
            raise MemoryFileError(
                f"the index of {folder.name} is larger than {pickle_reader.MAX_BYTES:,} bytes: write the memory to a "
                "file of its own with memory.save(path)"
            )
        data = path.read_bytes()
    except OSError as error:
        raise MemoryFileError(f"the index of {folder.name} cannot be read: {error}") from error
    index = pickle_reader.read(data)
    if not isinstance(index, Record) or index.name != f"{_CLASSES}Metadata":
        raise MemoryFileError(f"{folder.name} is not a torch.distributed checkpoint")
    locations: dict[str, Location] = {}
    for key, place in _pairs(_attribute(index, "storage_data")):
        name = _attribute(key, "fqn", f"{_CLASSES}MetadataIndex")
        if not isinstance(name, str):
            raise MemoryFileError(f"the index of {folder.name} is corrupted: the name of an entry is not a string")
        if name in locations:  # an entry in several chunks, which no tensor of a memory is
            continue
        locations[name] = _location(place)
    return locations


def _location(place: Any) -> Location:
    file, offset, length = (_attribute(place, name, _LOCATION) for name in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not file or "\0" in file or Path(file).name != file:
        raise MemoryFileError("the index of a checkpoint refers to a file outside of its folder")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise MemoryFileError("the index of a checkpoint has an invalid offset or length")
    if _attribute(place, "transform_descriptors", _LOCATION, None) is not None:
        raise MemoryFileError("the checkpoint is compressed: write the memory to a file of its own (memory.save)")
    return Location(file, offset, length)


_REQUIRED = object()


def _attribute(record: Any, name: str, kind: str | None = None, default: Any = _REQUIRED) -> Any:
    """An attribute of an instance in the index."""
    if isinstance(record, Record) and kind in (None, record.name) and isinstance(record.state, Pairs):
        for key, value in record.state.items:
            if isinstance(key, str) and key == name:
                return value
        if default is not _REQUIRED:
            return default
    raise MemoryFileError(f"the index of a checkpoint is corrupted: {name} is missing")


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise MemoryFileError("the index of a checkpoint is corrupted: its table of entries is not a dict")
    return value.items
