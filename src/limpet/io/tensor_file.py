"""Read and write tensor files: safetensors with a versioned header, no pickle.

The metadata in the header consists of four strings: `format`, `version`, `limpet` (a description of the content, as
JSON) and `sha256`, a checksum over this JSON and the name, dtype, shape and bytes of every tensor. Files that do not
match are rejected before their content is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.io.state import update_digest

VERSION = 1
HEADER_LIMIT = 100_000_000


def write(path: str | Path, format_name: str, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file atomically: it appears complete or not at all.

    Args:
        path: The file to write.
        format_name: The format stated in the header.
        description: JSON-serializable metadata.
        tensors: The tensors, by name.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: create it first")
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps(description, allow_nan=False)
    with whole(path) as temporary:
        save_file(kept, temporary, header(format_name, described, checksum(described, kept)))
        _order_header(temporary)


def header(format_name: str, described: str, digest: str) -> dict[str, str]:
    """Build the header metadata of a file.

    Args:
        format_name: The format of the file.
        described: The description of the content, as JSON.
        digest: The checksum.

    Returns:
        The metadata.
    """
    return {"format": format_name, "limpet": described, "sha256": digest, "version": str(VERSION)}


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the body completes, and is deleted if the body raises."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _order_header(path: Path) -> None:
    """Sort the metadata, which safetensors writes in random order, so that equal content gives equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) <= size:
            file.seek(8)
            file.write(ordered.ljust(size))


class Tensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is accessed.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast("Any", safe_open(path, framework="pt"))
        self._names = dict.fromkeys(self._file.keys())

    def metadata(self) -> dict[str, str]:
        """The metadata in the header."""
        return dict(self._file.metadata() or {})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()  # a copy, not a view of the memory-mapped file

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: str | Path, format_name: str) -> tuple[dict[str, Any], Tensors]:
    """Read a file and verify its checksum, for which the whole file is read once.

    Args:
        path: The file.
        format_name: The expected format.

    Returns:
        The description of the content, and the tensors, which are read lazily.

    Raises:
        MemoryFileError: If the file does not exist, has another format or version, or is corrupted.
    """
    path = Path(path)
    if not path.is_file():
        raise MemoryFileError(f"there is no file {path}")
    try:
        _check_header_size(path)
        tensors = Tensors(path)
        metadata = tensors.metadata()
        _check_metadata(metadata, format_name)
        if checksum(metadata["limpet"], tensors) != metadata["sha256"]:
            raise MemoryFileError(f"{path.name} is corrupted: its content does not match the checksum in its header")
        described = json.loads(metadata["limpet"], parse_constant=no_constant)
    except MemoryFileError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(f"{path.name} is not a limpet file, or is corrupted: {error}") from error
    if not isinstance(described, dict):
        raise MemoryFileError(f"{path.name} is not a limpet file: its header is not a JSON object")
    return described, tensors


def no_constant(name: str) -> None:
    """Reject NaN and Infinity, which are not valid JSON."""
    raise MemoryFileError(f"the header contains {name}, which is not valid JSON: the file is corrupted")


def _check_header_size(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        stated = int.from_bytes(file.read(8), "little")
    if size < 8 or stated > min(size - 8, HEADER_LIMIT):
        raise MemoryFileError(f"{path.name} is not a limpet file, or is corrupted: its header size is invalid")


def _check_metadata(metadata: Mapping[str, str], format_name: str) -> None:
    if metadata.get("format") != format_name:
        raise MemoryFileError(f"the file is a safetensors file, but not a {format_name}")
    if metadata.get("version") != str(VERSION):
        raise MemoryFileError(
            f"the file has format version {metadata.get('version')!r}, but this version of limpet reads version "
            f"{VERSION}: install the version of limpet that wrote the file, or a newer one"
        )
    if not {"limpet", "sha256"} <= metadata.keys():
        raise MemoryFileError("the header is incomplete: the file is corrupted")


def checksum(described: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 checksum over the description and all tensors, one tensor at a time.

    Args:
        described: The description of the content, as JSON.
        tensors: The tensors, by name.

    Returns:
        The hexadecimal digest.
    """
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        update_digest(digest, name, tensors[name])
    return digest.hexdigest()
