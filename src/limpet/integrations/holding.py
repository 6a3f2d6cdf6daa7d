"""What a memory has to say while a training goes on, for the log of any library."""

from __future__ import annotations

import torch

from limpet.methods import Memory
from limpet.protect import Protection


@torch.no_grad()
def logged(memory: Memory, protection: Protection) -> dict[str, float]:
    """The forecast in nats per old example, and the penalty as it stands beside the loss."""
    found = {"memory_forecast": float(memory.forecast())}
    if not memory.sharded:  # no rank knows all of the penalty
        found["memory_penalty"] = float(memory.penalty()) * protection.weight
    return found
