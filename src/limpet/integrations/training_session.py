"""Protection during a training loop that is driven by callbacks."""

from __future__ import annotations

from typing import Any

import torch

from limpet.errors import LimpetError, logger
from limpet.methods import Memory
from limpet.protection.summary import ProtectionSummary


class TrainingSession:
    """`with memory.protect(optimizer, examples=N, ...)` for callbacks, where entry and exit are separate calls.

    Args:
        memory: The memory.
        optimizer: The optimizer to protect.
        examples: The number of examples of the new task.
        **options: Further options of `memory.protect`.
    """

    def __init__(self, memory: Memory, optimizer: Any, *, examples: int, **options: Any) -> None:
        self.memory, self.examples = memory, examples
        self._protection = memory.protect(optimizer, examples=examples, **options).__enter__()

    def let_go(self, *, finished: bool) -> ProtectionSummary:
        """End the protection, and log what it did.

        Args:
            finished: Whether training has completed. If not, it is exited as if the body had raised an error.

        Returns:
            The summary of the protection.
        """
        self._protection.__exit__(None if finished else LimpetError)
        summary = self._protection.summary()
        logger.info("protection: %s", summary)
        return summary

    @torch.no_grad()
    def logged(self) -> dict[str, float]:
        """The metrics to log: the forecast in nats per old example, and the penalty on the scale of the loss."""
        metrics = {"memory_forecast": float(self.memory.forecast())}
        if not self.memory.sharded:  # each rank knows only its own part of the penalty
            metrics["memory_penalty"] = self._protection.penalty()
        return metrics
