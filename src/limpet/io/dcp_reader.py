"""Read torch.distributed checkpoints without executing code that may be embedded in them.

The index of a checkpoint is a pickle, and so is every entry that is not a tensor. The index is read by a restricted
unpickler that allows only the classes an index consists of, and entries are read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import inspect
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from limpet.errors import MemoryFileError

# Older versions of torch have no_dist= only in what `load` calls.
_HAS_NO_DIST = "no_dist" in inspect.signature(state_dict_loader.load).parameters
_load: Any = state_dict_loader.load if _HAS_NO_DIST else state_dict_loader._load_state_dict

KNOWN = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""The classes and functions that the index of a checkpoint may refer to, by module."""


class _Unpickler(pickle.Unpickler):
    """An unpickler restricted to `KNOWN` and torch dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolve an allowed global, and reject all others."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN.get(module, ()):
            raise MemoryFileError(
                f"the checkpoint's index refers to {module}.{name}, which is not part of a torch.distributed "
                "checkpoint and could execute code, so it was not loaded: check where the checkpoint comes from"
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """A `FileSystemReader` that reads the index with the restricted unpickler."""

    def __init__(self, folder: str | Path, index: str) -> None:
        super().__init__(folder)
        self._index = self._read_index(Path(folder) / index)

    def _read_index(self, path: Path) -> Metadata:
        with path.open("rb") as file:
            try:
                found = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
                raise MemoryFileError(f"the index of checkpoint {path.parent.name} cannot be read: {error}") from error
        if not isinstance(found, Metadata):
            raise MemoryFileError(f"{path.parent.name} is not a torch.distributed checkpoint")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was read by the restricted unpickler."""
        return self._index


class _PlainValues(DefaultLoadPlanner):
    """A load planner that unpickles entries with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is not a tensor."""
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Reader:
    """A reader for single entries of a checkpoint.

    Args:
        folder: The checkpoint folder.
        index: The name of the index file in this folder.

    Attributes:
        entries: torch's storage metadata of every entry, by name.
    """

    def __init__(self, folder: str | Path, index: str) -> None:
        self._reader = _Reader(folder, index)
        self.entries: dict[str, Any] = dict(self._reader.read_metadata().state_dict_metadata)

    def read(self, key: str, place: Any) -> Any:
        """Read one entry on this rank, without communication.

        Args:
            key: The name of the entry.
            place: A tensor to read into, or any placeholder if the entry is not a tensor.

        Returns:
            The value of the entry.
        """
        state = {key: place}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns about loading in a single process
            _load(state, storage_reader=self._reader, planner=_PlainValues(flatten_state_dict=False), no_dist=True)
        return state[key]
