"""The state of a memory, as stored in a file or a checkpoint, and the checksums that it carries.

A checkpoint of torch.distributed has no checksums, so the state of a memory has its own: the SHA-256 of every tensor in
`checksums`, and that of all metadata, including `checksums`, in `sha256`. Every rank verifies the tensors it reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from limpet.distributed import Ranks
from limpet.errors import MemoryFileError


class State(TypedDict):
    """The return type of `memory.state_dict()`.

    With a sharded memory, each rank has only the tensors of the blocks it owns.
    """

    metadata: str  # JSON, so that torch.distributed.checkpoint stores it as a single value
    tensors: Mapping[str, Tensor]


def update_digest(digest: Any, name: str, tensor: Tensor) -> None:
    """Add the name, dtype, shape and bytes of a tensor to a hash.

    Args:
        digest: A hash object of `hashlib`.
        name: The name of the tensor.
        tensor: The tensor.
    """
    digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def sealed(state: State, ranks: Ranks | None) -> State:
    """Add checksums to a state.

    Args:
        state: The state.
        ranks: The ranks that share the memory, if it is sharded. Then this is a collective.

    Returns:
        The state with `checksums` and `sha256` in its metadata.
    """
    own = {name: _checksum(name, tensor) for name, tensor in state["tensors"].items()}
    checksums = {name: digest for some in (ranks.gather(own) if ranks else [own]) for name, digest in some.items()}
    metadata = {**json.loads(state["metadata"]), "checksums": dict(sorted(checksums.items()))}
    return {"metadata": json.dumps({**metadata, "sha256": _metadata_checksum(metadata)}), "tensors": state["tensors"]}


def unsealed(metadata: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Verify the checksum of the metadata, and let every tensor be verified when it is accessed.

    Args:
        metadata: The decoded metadata of a state.
        tensors: The tensors of the state.

    Returns:
        The metadata without checksums, and the tensors. States that have no checksums are returned as they are.

    Raises:
        MemoryFileError: If the metadata do not match their checksum.
    """
    if "sha256" not in metadata:
        return metadata, tensors
    plain = {name: value for name, value in metadata.items() if name != "sha256"}
    if _metadata_checksum(plain) != metadata["sha256"]:
        raise MemoryFileError("the memory is corrupted: its metadata do not match their checksum")
    return plain, Verified(tensors, plain.pop("checksums"))


class Verified(Mapping[str, Tensor]):
    """Tensors whose checksums are verified when they are accessed.

    Args:
        tensors: The tensors by name.
        checksums: The SHA-256 of each, as a hexadecimal digest.
    """

    def __init__(self, tensors: Mapping[str, Tensor], checksums: Mapping[str, str]) -> None:
        self._tensors, self._checksums = tensors, checksums

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if _checksum(name, tensor) != self._checksums.get(name):
            raise MemoryFileError(f"the memory is corrupted: {name} does not match its checksum")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _checksum(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256()
    update_digest(digest, name, tensor)
    return digest.hexdigest()


def _metadata_checksum(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
