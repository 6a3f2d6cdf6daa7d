"""How many bytes of tensors are alive, looked at after every operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes at a time of the storages that operations in the body made or used; `now`: the last."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "to_local"):
                self._known.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    @property
    def now(self) -> int:
        """Storages may shrink: fully_shard frees whole weights so."""
        return sum(storage.nbytes() for storage in self._known)
