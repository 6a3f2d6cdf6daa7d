"""Store equal tensors once: a file contains the first of them, and its description says which names refer to it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from limpet.distributed.process_group import Ranks
from limpet.errors import MemoryFileError
from limpet.io.state import update_digest


def equal_tensors(tensors: Mapping[str, Tensor], names: Collection[str], ranks: Ranks | None = None) -> dict[str, str]:
    """Find tensors that are equal bit for bit.

    Args:
        tensors: The tensors by name.
        names: The names of those to compare.
        ranks: The process group, if every rank has its own tensors. Then this is a collective.

    Returns:
        The name of the first tensor that is equal, in alphabetical order, for every tensor after it.
    """
    own = {name: _digest(tensors[name]) for name in names}
    digests = {name: digest for some in (ranks.gather(own) if ranks else [own]) for name, digest in some.items()}
    found: dict[str, str] = {}
    firsts: dict[str, str] = {}
    for name, digest in sorted(digests.items()):
        if firsts.setdefault(digest, name) != name:
            found[name] = firsts[digest]
    return found


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    update_digest(digest, "", tensor)
    return digest.hexdigest()


class SharedTensors(Mapping[str, Tensor]):
    """The tensors of a file, some of them under several names.

    Args:
        tensors: The tensors of the file.
        shared: Further names, with the names of the tensors that they refer to.

    Attributes:
        shared: The further names.

    Raises:
        MemoryFileError: If a further name is that of a tensor, or refers to none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shared: Mapping[str, Any]) -> None:
        wrong = [name for name, other in shared.items() if name in tensors or other not in tensors]
        if wrong:
            raise MemoryFileError(f"the file is corrupted: {wrong[0]} refers to a tensor that is not there")
        self._tensors, self.shared = tensors, shared

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self.shared.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self.shared

    def __len__(self) -> int:
        return len(self._tensors) + len(self.shared)
