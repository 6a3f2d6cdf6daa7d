"""What must be the same on all ranks before an operation of a memory: settings, arguments and replicated weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from limpet.distributed import ReplicatedBatches, current, together
from limpet.model.fingerprint import fingerprint_of_replica
from limpet.posterior import Posterior

OF_ONE_RANK = ("probes", "history")
"""Settings that may differ: every rank has its own probe, and loss curves are measured."""


def consolidating(
    posterior: Posterior, settings: Callable[[], Mapping[str, Any]], batches: Any, arguments: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Guard a pass of all ranks over data, such as a consolidation.

    Args:
        posterior: The posterior of the memory.
        settings: Returns the settings of the memory.
        batches: The batches of this rank.
        arguments: The other arguments, by name. Of those that are not numbers, it is compared whether they are given.

    Returns:
        A context manager for the pass. It does nothing in a single process.
    """

    def alike() -> dict[str, Any]:
        given = {f"the argument {name}": _plain(value) for name, value in arguments.items()}
        kind = "replicated" if isinstance(batches, ReplicatedBatches) else "a share of this rank"
        chosen = {f"the setting {name}": value for name, value in settings().items() if name not in OF_ONE_RANK}
        weights = fingerprint_of_replica(posterior.parameters())
        return {**chosen, **weights, **given, "the kind of batches": kind}

    return together("consolidate", current(), alike, runs_model=posterior.sharding is not None)


def sharing(posterior: Posterior, operation: str) -> AbstractContextManager[None]:
    """Guard an operation that is a collective if the memory is sharded, and local otherwise.

    Args:
        posterior: The posterior of the memory.
        operation: The name of the operation.

    Returns:
        A context manager for the operation.
    """
    return together(operation, None if posterior.sharding is None else current())


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else "given"
