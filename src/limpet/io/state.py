"""The state of a memory, as stored in a file or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor


class State(TypedDict):
    """The return type of `memory.state_dict()`.

    With a sharded memory, each rank has only the tensors of the blocks it owns.
    """

    metadata: str  # JSON, so that torch.distributed.checkpoint stores it as a single value
    tensors: Mapping[str, Tensor]
