"""What must be the same on all ranks before an operation of a memory: settings, arguments and replicated weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from limpet.distributed import ReplicatedBatches, current, together
from limpet.model.fingerprint import fingerprint_of_replica

if TYPE_CHECKING:
    from limpet.methods.memory import Memory

OF_ONE_RANK = ("probes", "history")
"""Settings that may differ: every rank has its own probe, and loss curves are measured."""


def consolidating(memory: Memory, batches: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Guard a pass of all ranks over data, such as a consolidation.

    Args:
        memory: The memory.
        batches: The batches of this rank.
        arguments: The other arguments, by name. Of those that are not numbers, it is compared whether they are given.

    Returns:
        A context manager for the pass. It does nothing in a single process.
    """

    def alike() -> dict[str, Any]:
        given = {f"the argument {name}": _plain(value) for name, value in arguments.items()}
        kind = "replicated" if isinstance(batches, ReplicatedBatches) else "a share of this rank"
        return {**_of_memory(memory), **given, "the kind of batches": kind}

    return together("consolidate", current(), alike, runs_model=memory.sharded)


def sharing(memory: Memory, operation: str) -> AbstractContextManager[None]:
    """Guard an operation that is a collective if the memory is sharded, and local otherwise.

    Args:
        memory: The memory.
        operation: The name of the operation.

    Returns:
        A context manager for the operation.
    """
    sharding = memory.posterior.sharding
    return together(operation, None if sharding is None else current())


def _of_memory(memory: Memory) -> dict[str, Any]:
    settings = {f"the setting {name}": v for name, v in memory._settings().items() if name not in OF_ONE_RANK}
    return {**settings, **fingerprint_of_replica(memory.posterior.parameters())}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else "given"
