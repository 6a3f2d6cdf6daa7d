"""A memory that holds the optimizer of somebody else's training loop, from its beginning to its end."""

from __future__ import annotations

from typing import Any

import torch

from limpet.errors import LimpetError
from limpet.methods import Memory


class TrainingSession:
    """`with memory.protect(optimizer, examples=N, ...)` for callbacks, which begin here and end there."""

    def __init__(self, memory: Memory, optimizer: Any, *, examples: int, **options: Any) -> None:
        self.memory, self.examples = memory, examples
        self._protection = memory.protect(optimizer, examples=examples, **options).__enter__()

    def let_go(self, *, finished: bool) -> None:
        """Leave the body; unfinished is as by an error."""
        self._protection.__exit__(None if finished else LimpetError)

    @torch.no_grad()
    def logged(self) -> dict[str, float]:
        """The forecast in nats per old example, and the penalty as it stands beside the loss."""
        found = {"memory_forecast": float(self.memory.forecast())}
        if not self.memory.sharded:  # no rank knows all of the penalty
            found["memory_penalty"] = self._protection.penalty()
        return found
