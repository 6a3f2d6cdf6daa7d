"""Read and write the state of a memory as a file (`limpet.io.tensor_file` defines the format)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet.distributed import Ranks
from limpet.io import sharded_tensor_file, tensor_file
from limpet.io.shared_tensors import SharedTensors, equal_tensors
from limpet.io.state import State
from limpet.methods.state_header import rejecting_damage

FORMAT = "limpet memory"
REFLECTIONS = ".reflections"
"""Part of the names of eigenvectors, which layers with the same input have in common."""


def _stored(state: State, ranks: Ranks | None) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """What a file contains: the metadata, the tensors, of which equal eigenvectors are stored once, and its version.

    The checksums of the state are left out, because a file has its own.
    """
    described: dict[str, Any] = json.loads(state["metadata"])
    described = {name: value for name, value in described.items() if name not in ("checksums", "sha256")}
    tensors = state["tensors"]
    shared = equal_tensors(tensors, [name for name in tensors if REFLECTIONS in name], ranks)
    if shared:
        described["shared"] = shared
    return described, {name: tensor for name, tensor in tensors.items() if name not in shared}, _version(described)


def _version(described: Mapping[str, Any]) -> int:
    """The oldest format version that has what is needed.

    Version 2 has truncated factors and means that are not stored, and version 3 tensors under several names.
    """
    if "shared" in described:
        return 3
    new = "rank" in described["settings"] or any(
        "base" in block or "quantized" in block or any(key.endswith("_rank") for key in block["precision"])
        for block in described.get("blocks", ())
    )
    return 2 if new else 1


def write(path: str | Path, state: State) -> None:
    """Write a state to a file, atomically.

    Args:
        path: Path of the file.
        state: The state.
    """
    described, tensors, version = _stored(state, None)
    tensor_file.write(path, FORMAT, described, tensors, version)


def write_together(path: str | Path, state: State, ranks: Ranks) -> None:
    """Write a sharded state to a single file, identical to one written by a single process. A collective.

    Args:
        path: Path of the file, on a file system that all ranks share.
        state: This rank's part of the state.
        ranks: The process group.
    """
    described, tensors, version = _stored(state, ranks)
    sharded_tensor_file.write(path, FORMAT, described, tensors, ranks, version)


def read(path: str | Path, *, sha256: str | None = None) -> State:
    """Read a state from a file, with all checks that need no model.

    Args:
        path: Path of the file.
        sha256: The SHA-256 that the file must have. None accepts any.

    Returns:
        The state. Its tensors are read lazily.

    Raises:
        MemoryFileError: If the file is not a limpet memory, is corrupted, or has another SHA-256.
    """
    described, tensors = tensor_file.read(path, FORMAT, sha256=sha256)
    shared = described.pop("shared", {})
    with rejecting_damage():
        return {"metadata": json.dumps(described), "tensors": SharedTensors(tensors, shared) if shared else tensors}
