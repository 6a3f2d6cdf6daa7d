"""Read a checkpoint of torch.distributed.checkpoint without running what may be hidden in it.

Its index is a pickle, and so is every entry that is no tensor. Here the index is read by an unpickler that knows the
classes of such an index and nothing else, and entries by torch's own that takes plain values alone.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from limpet.errors import MemoryFileError

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
"""What the index of a checkpoint is made of."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN.get(module, ()):
            raise MemoryFileError(
                f"the checkpoint's index wants {module}.{name}, which no such index needs, so it is not read: whom is "
                "it from?"
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, folder: str | Path, index: str) -> None:
        super().__init__(folder)
        self._index = self._read_index(Path(folder) / index)

    def _read_index(self, path: Path) -> Metadata:
        with path.open("rb") as file:
            try:
                found = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
                raise MemoryFileError(f"{path.parent.name} has no index that could be read: {error}") from error
        if not isinstance(found, Metadata):
            raise MemoryFileError(f"{path.parent.name} is no checkpoint of torch.distributed.checkpoint")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _PlainValues(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Reader:
    """A checkpoint in a folder, whose index is a file there: `entries` has what torch says of each, by name."""

    def __init__(self, folder: str | Path, index: str) -> None:
        self._reader = _Reader(folder, index)
        self.entries: dict[str, Any] = dict(self._reader.read_metadata().state_dict_metadata)

    def read(self, key: str, place: Any) -> Any:
        """One entry, by this rank alone; a tensor into `place`."""
        state = {key: place}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is read by one process, which is meant
            load(state, storage_reader=self._reader, planner=_PlainValues(flatten_state_dict=False), no_dist=True)
        return state[key]
