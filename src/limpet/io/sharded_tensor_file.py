"""Write one safetensors file from several ranks, without gathering all tensors on any of them.

In the safetensors format (a length, a JSON header, the bytes of the tensors), the names, dtypes and shapes determine
where the bytes of every tensor go, so each rank writes its own tensors in place. The ranks must share a file system.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.distributed.process_group import Ranks
from limpet.errors import MemoryFileError
from limpet.io import tensor_file

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
UNKNOWN = "0" * 64
"""Placeholder for the checksum until all tensors are written."""


def write(
    path: str | Path, format_name: str, description: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: Ranks
) -> None:
    """Write a file to which every rank contributes tensors. Collective and atomic.

    Args:
        path: The file to write, in a folder that all ranks can access.
        format_name: The format stated in the header.
        description: JSON-serializable metadata, the same on all ranks.
        tensors: The tensors of this rank, by names that are unique across ranks.
        ranks: The process group.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.together")
    described = json.dumps(description, allow_nan=False)
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    all_entries = {name: entry for some in ranks.gather(entries) for name, entry in some.items()}
    header, starts = _layout(all_entries, tensor_file.header(format_name, described, UNKNOWN))

    def begin() -> None:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: create it first")
        temporary.write_bytes(header)

    def put() -> None:
        with temporary.open("r+b") as file:
            for name, tensor in tensors.items():
                file.seek(len(header) + starts[name])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish() -> None:
        digest = tensor_file.checksum(described, tensor_file.Tensors(temporary))
        with temporary.open("r+b") as file:
            file.write(header.replace(UNKNOWN.encode(), digest.encode(), 1))
        temporary.replace(path)

    try:
        _run_in_step(ranks, begin if not ranks.rank else None, put, finish if not ranks.rank else None)
    finally:
        if not ranks.rank:
            temporary.unlink(missing_ok=True)


def _run_in_step(ranks: Ranks, *steps: Callable[[], None] | None) -> None:
    """Run the steps with a barrier after each; an error on one rank is raised on all ranks."""
    for step in steps:
        error: Exception | None = None
        try:
            if step is not None:
                step()
        except (OSError, MemoryFileError) as raised:
            error = raised
        ranks.raise_together(error)


def _layout(
    entries: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the first tensor, and each tensor's offset after them: widest dtypes first, then by name."""
    starts, content, at = {}, {"__metadata__": dict(metadata)}, 0
    for name in sorted(entries, key=lambda name: (-entries[name][0].itemsize, name)):
        dtype, shape = entries[name]
        size = shape.numel() * dtype.itemsize
        starts[name] = at
        content[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, starts
