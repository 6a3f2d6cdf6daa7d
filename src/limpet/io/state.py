"""The state of a memory, as a file or a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor


class State(TypedDict):
    """What `memory.state_dict()` returns. With a sharded memory each rank has the tensors of its own blocks."""

    metadata: str  # JSON, so that what stores it (torch.distributed.checkpoint) treats it as one value
    tensors: Mapping[str, Tensor]
