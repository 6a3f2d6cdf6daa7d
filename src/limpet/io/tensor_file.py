"""Files of tensors: safetensors with a versioned header, no pickle.

The header's metadata hold four strings: `format`, `version`, `limpet` (what the file says about itself, as JSON) and
`sha256`, over the JSON and over name, dtype, shape and bytes of every tensor. What does not fit is refused before it is
used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from limpet.errors import MemoryFileError

VERSION = 1
HEADER_LIMIT = 100_000_000


def write(path: str | Path, format_name: str, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file; it appears whole or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in")
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps(description, allow_nan=False)
    with whole(path) as temporary:
        save_file(kept, temporary, header(format_name, described, checksum(described, kept)))
        _order_header(temporary)


def header(format_name: str, described: str, digest: str) -> dict[str, str]:
    """What stands in a file beside its tensors."""
    return {"format": format_name, "limpet": described, "sha256": digest, "version": str(VERSION)}


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to; the file appears under its name when the body ends, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _order_header(path: Path) -> None:
    """Sort the header's metadata, which safetensors writes in a random order, so that equal content is equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) <= size:
            file.seek(8)
            file.write(ordered.ljust(size))


class Tensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = cast("Any", safe_open(path, framework="pt"))
        self._names = dict.fromkeys(self._file.keys())

    def metadata(self) -> dict[str, str]:
        """What stands in the header beside the tensors."""
        return dict(self._file.metadata() or {})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()  # of its own, not of the file's pages

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: str | Path, format_name: str) -> tuple[dict[str, Any], Tensors]:
    """What the file says about itself, and its tensors. The whole file is read once, to check it."""
    path = Path(path)
    if not path.is_file():
        raise MemoryFileError(f"there is no file {path}")
    try:
        _check_header_size(path)
        tensors = Tensors(path)
        metadata = tensors.metadata()
        _check_metadata(metadata, format_name)
        if checksum(metadata["limpet"], tensors) != metadata["sha256"]:
            raise MemoryFileError(f"{path.name} is damaged: its content does not have the checksum its header states")
        described = json.loads(metadata["limpet"], parse_constant=no_constant)
    except MemoryFileError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(f"{path.name} is no file of ours, or a damaged one: {error}") from error
    if not isinstance(described, dict):
        raise MemoryFileError(f"{path.name} has a header that is not one of ours")
    return described, tensors


def no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are not JSON."""
    raise MemoryFileError(f"the header of the file holds {name}, which no file of ours does")


def _check_header_size(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        stated = int.from_bytes(file.read(8), "little")
    if size < 8 or stated > min(size - 8, HEADER_LIMIT):
        raise MemoryFileError(f"{path.name} is no file of ours, or a damaged one: its header does not fit into it")


def _check_metadata(metadata: Mapping[str, str], format_name: str) -> None:
    if metadata.get("format") != format_name:
        raise MemoryFileError(f"this is a safetensors file, but not a {format_name}")
    if metadata.get("version") != str(VERSION):
        raise MemoryFileError(
            f"the file is of format version {metadata.get('version')!r}, this library reads version {VERSION}: install "
            "the limpet that wrote it, or a newer one"
        )
    if not {"limpet", "sha256"} <= metadata.keys():
        raise MemoryFileError("the header of the file is not whole")


def checksum(described: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the JSON and all tensors, one after another."""
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
