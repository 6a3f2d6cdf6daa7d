"""Write one safetensors file from several ranks, without gathering all tensors on any of them.

In the safetensors format (a length, a JSON header, the bytes of the tensors), the names, dtypes and shapes determine
where the bytes of every tensor go, so each rank writes its own tensors in place. The ranks must share a file system.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet.distributed.process_group import Ranks
from limpet.io import atomic, tensor_file

UNKNOWN = "0" * 64
"""Placeholder for the checksum until all tensors are written."""


def write(
    path: str | Path,
    format_name: str,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    version: int = tensor_file.VERSIONS[0],
) -> None:
    """Write a file to which every rank contributes tensors. Collective and atomic.

    Args:
        path: The file to write, in a folder that all ranks can access.
        format_name: The format stated in the header.
        description: JSON-serializable metadata, the same on all ranks.
        tensors: The tensors of this rank, by names that are unique across ranks.
        ranks: The process group.
        version: The format version stated in the header.

    Raises:
        RankError: If the folder does not exist, or the operating system of a rank reports an error, such as a full
            disk. On that rank, the cause is the FileNotFoundError or SaveError.
    """
    path = Path(path)
    described = json.dumps(description, allow_nan=False)
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    told = ranks.gather((entries, atomic.temporary_name(Path(os.path.realpath(path)))))
    all_entries = {name: entry for some, _ in told for name, entry in some.items()}
    header, starts = tensor_file.layout(all_entries, tensor_file.header(format_name, described, UNKNOWN, version))
    size = len(header) + sum(dtype.itemsize * shape.numel() for dtype, shape in all_entries.values())
    temporary_name = told[0][1]  # all ranks write to the file that rank 0 creates and keeps locked
    pending: list[atomic.PendingFile] = []

    def begin() -> None:
        with atomic.saving(path, size) as target:
            pending.append(atomic.PendingFile.create(target, temporary_name))
            pending[0].path.write_bytes(header)

    def put() -> None:
        with atomic.saving(path, size) as target, target.with_name(temporary_name).open("r+b") as file:
            for name, tensor in tensors.items():
                file.seek(len(header) + starts[name])
                file.write(tensor_file.raw_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())

    def finish() -> None:
        with atomic.saving(path, size):
            temporary = pending[0].path
            digest = tensor_file.checksum(described, tensor_file.Tensors(temporary))
            with temporary.open("r+b") as file:
                file.write(header.replace(UNKNOWN.encode(), digest.encode(), 1))
            pending[0].commit()

    try:
        ranks.attempt(begin if not ranks.rank else None)
        ranks.attempt(put)
        ranks.attempt(finish if not ranks.rank else None)
    finally:
        for file in pending:
            file.discard()
