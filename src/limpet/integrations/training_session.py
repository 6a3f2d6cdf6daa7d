"""Protection during a training loop that is driven by callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from limpet.errors import LimpetError, logger
from limpet.io.hub import FILE
from limpet.methods import Memory, OutputMemory
from limpet.model import Forward
from limpet.protection.output_protection import OutputProtection, OutputSummary
from limpet.protection.summary import ProtectionSummary

if TYPE_CHECKING:
    from limpet.protection.protection import Protection

Summary = ProtectionSummary | OutputSummary
"""What a protection did."""

ONLY_WEIGHTS = ("batches", "repair")
"""Options of `Memory.protect` that a protection of outputs does not have."""


class TrainingSession:
    """`with memory.protect(optimizer, examples=N, ...)` for callbacks, where entry and exit are separate calls.

    Args:
        memory: The memory.
        optimizer: The optimizer to protect.
        examples: The number of examples of the new task. A protection of outputs does not need it.
        **options: Further options of `memory.protect`.
    """

    def __init__(self, memory: Memory | OutputMemory, optimizer: Any, *, examples: int | None, **options: Any) -> None:
        self.memory, self.examples = memory, examples
        self._protection: Protection | OutputProtection
        if isinstance(memory, OutputMemory):
            options = {name: value for name, value in options.items() if name not in ONLY_WEIGHTS}
            self._protection = memory.protect(optimizer, examples=examples, **options).__enter__()
        else:
            assert examples is not None
            self._protection = memory.protect(optimizer, examples=examples, **options).__enter__()

    def let_go(self, *, finished: bool) -> Summary:
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
        """The metrics to log.

        Returns:
            The forecast in nats per old example, whether it can be trusted (1 or 0), and the penalty on the scale of
            the loss. For a protection of outputs, the drift on held-out inputs, if there are any, and the weighted
            divergence.
        """
        if isinstance(self.memory, OutputMemory):
            drift = {"outputs_drift": float(self.memory.drift())} if self.memory.probes else {}
            return {**drift, "outputs_penalty": self._protection.penalty()}
        forecast = self.memory._forecast()
        metrics = {"memory_forecast": float(forecast), "memory_forecast_trusted": float(forecast.trusted)}
        if not self.memory.sharded:  # each rank knows only its own part of the penalty
            metrics["memory_penalty"] = self._protection.penalty()
        return metrics


def file_name(memory: Memory | OutputMemory) -> str:
    """Return the name of a memory's file in a checkpoint, such that memories of weights and outputs have two."""
    return f"{memory.method}.safetensors" if isinstance(memory, OutputMemory) else FILE


def count_examples(
    memory: Memory | OutputMemory, data: Iterable[Any], examples: int | None, forward: Forward | None = None
) -> int | None:
    """Count the examples of the new task, if they are needed and were not given.

    Args:
        memory: The memory.
        data: The training data.
        examples: The number, if it is known.
        forward: As in `memory.count`.

    Returns:
        The number, or None for a protection of outputs.
    """
    if examples is not None or isinstance(memory, OutputMemory):
        return examples
    return memory.count(data, forward=forward)


def consolidate_trained(
    memory: Memory | OutputMemory,
    data: Iterable[Any],
    *,
    examples: int | None,
    limit: int | None,
    forward: Forward | None = None,
) -> None:
    """Consolidate a task after training.

    A memory of outputs takes the trained model for the model before. The training data are not passed to it, because it
    would store them.

    Args:
        memory: The memory.
        data: The training data.
        examples: The number of examples.
        limit: The maximum number of examples used to estimate curvature.
        forward: As in `memory.consolidate`.
    """
    if isinstance(memory, OutputMemory):
        memory.consolidate()
    else:
        memory.consolidate(data, examples=examples, limit=limit, forward=forward)
