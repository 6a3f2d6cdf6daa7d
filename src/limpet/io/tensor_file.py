"""Read and write tensor files: safetensors with a versioned header, no pickle.

The metadata in the header consists of four strings: `format`, `version`, `limpet` (a description of the content, as
JSON) and `sha256`, a checksum over this JSON and the name, dtype, shape and bytes of every tensor. Files that do not
match are rejected before their content is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from limpet.errors import MemoryFileError, UnsupportedError
from limpet.io.atomic import atomic_write
from limpet.io.state import update_digest

VERSIONS = (1, 2, 3)
"""Format versions that are read. A file is written in the oldest that has what it needs."""
HEADER_LIMIT = 100_000_000
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The dtypes of safetensors, in the order of their alignment: the last ones come first in a file."""


def write(
    path: str | Path,
    format_name: str,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    version: int = VERSIONS[0],
) -> None:
    """Write a file atomically: it appears complete or not at all (`limpet.io.atomic`).

    Args:
        path: The file to write.
        format_name: The format stated in the header.
        description: JSON-serializable metadata.
        tensors: The tensors, by name.
        version: The format version stated in the header.

    Raises:
        FileNotFoundError: If the folder does not exist.
        SaveError: If the operating system reports an error, such as a full disk.
        UnsupportedError: If a tensor has a dtype that safetensors files do not have.
    """
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps(description, allow_nan=False)
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in kept.items()}
    start, offsets = layout(entries, header(format_name, described, checksum(described, kept), version))
    size = len(start) + sum(tensor.nbytes for tensor in kept.values())
    with atomic_write(path, size=size) as temporary, temporary.open("r+b") as file:
        file.write(start)
        for name in offsets:
            file.write(raw_bytes(kept[name]))


def layout(
    entries: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Determine where everything is in a safetensors file: a length, a JSON header, the bytes of the tensors.

    It is the layout of the safetensors library with the metadata sorted, so equal content gives equal bytes.

    Args:
        entries: The dtype and shape of every tensor, by name.
        metadata: The metadata in the header.

    Returns:
        The bytes before the first tensor, and each tensor's offset after them, in the order of the offsets.

    Raises:
        UnsupportedError: If a tensor has a dtype that safetensors files do not have.
    """
    for name, (dtype, _) in entries.items():
        if dtype not in DTYPES:
            raise UnsupportedError(f"{name} has dtype {dtype}, which safetensors files do not have: convert it first")
    rank = {dtype: number for number, dtype in enumerate(DTYPES)}
    content: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offsets, at = {}, 0
    for name in sorted(entries, key=lambda name: (-rank[entries[name][0]], name)):
        dtype, shape = entries[name]
        end = at + shape.numel() * dtype.itemsize
        content[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        offsets[name], at = at, end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, offsets


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def header(format_name: str, described: str, digest: str, version: int = VERSIONS[0]) -> dict[str, str]:
    """Build the header metadata of a file.

    Args:
        format_name: The format of the file.
        described: The description of the content, as JSON.
        digest: The checksum.
        version: The format version.

    Returns:
        The metadata.
    """
    return {"format": format_name, "limpet": described, "sha256": digest, "version": str(version)}


class Tensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is accessed.

    Args:
        path: The file.
        sha256: The SHA-256 that the file must have, verified before anything is parsed. None accepts any.

    Raises:
        MemoryFileError: If the file has another SHA-256, or is replaced while it is opened. Accessing a tensor raises
            it if the file was changed in place since; reading a memory-mapped file that was truncated would end the
            process.
    """

    def __init__(self, path: Path, *, sha256: str | None = None) -> None:
        self._name = path.name
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, _close, self._descriptor)
        self._opened = os.fstat(self._descriptor)
        if sha256 is not None and (found := self.sha256()) != sha256.lower():
            raise MemoryFileError(f"the SHA-256 of {path} is {found}, not {sha256}: it is not the file that you expect")
        _check_header_size(path)
        self._file = cast("Any", safe_open(path, framework="pt"))
        if not os.path.samestat(self._opened, path.stat()):
            raise MemoryFileError(f"{path.name} was replaced while it was opened: load it again")
        self._names = dict.fromkeys(self._file.keys())

    def metadata(self) -> dict[str, str]:
        """The metadata in the header."""
        return dict(self._file.metadata() or {})

    def sha256(self) -> str:
        """Compute the SHA-256 of the file, as a hexadecimal digest."""
        digest = hashlib.sha256()
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while block := os.read(self._descriptor, 1 << 20):
            digest.update(block)
        return digest.hexdigest()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        self._check_unchanged()
        tensor: Tensor = self._file.get_tensor(name).clone()  # a copy, not a view of the memory-mapped file
        self._check_unchanged()
        return tensor

    def _check_unchanged(self) -> None:
        now, opened = os.fstat(self._descriptor), self._opened
        if (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
            raise MemoryFileError(f"{self._name} was changed while it was read: load it again")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


def read(path: str | Path, format_name: str, *, sha256: str | None = None) -> tuple[dict[str, Any], Tensors]:
    """Read a file and verify its checksum, for which the whole file is read once.

    Args:
        path: The file.
        format_name: The expected format.
        sha256: The SHA-256 that the file must have, verified before its content is used. None accepts any.

    Returns:
        The description of the content, and the tensors, which are read lazily.

    Raises:
        MemoryFileError: If the file does not exist, has another SHA-256, format or version, or is corrupted.
    """
    path = Path(path)
    _check_exists(path)
    try:
        tensors = Tensors(path, sha256=sha256)
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


def _check_exists(path: Path) -> None:
    if path.is_file():
        return
    if path.is_symlink() and not path.exists():
        raise MemoryFileError(f"{path} is a symbolic link that leads nowhere: its target was moved or deleted")
    raise MemoryFileError(f"{path} is not a regular file" if path.exists() else f"there is no file {path}")


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
    if metadata.get("version") not in [str(version) for version in VERSIONS]:
        raise MemoryFileError(
            f"the file has format version {metadata.get('version')!r}, but this version of limpet reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}: install the version of limpet that wrote the file, or a newer one"
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
