"""Private data in a memory: what is refused together with `privacy=`, what is recorded, and when to warn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limpet.curvature.privacy import Privacy
from limpet.errors import PrivacyWarning, UnsupportedError, warn

if TYPE_CHECKING:
    from limpet.curvature import Fisher
    from limpet.methods.memory import Memory


def check_private(
    memory: Memory, privacy: Any, *, smoothing: float, checkpoint: str | Path | None, probe: int | None
) -> None:
    """Raise if a consolidation with this budget would release anything that the budget does not cover.

    Args:
        memory: The memory.
        privacy: The budget.
        smoothing: The `smoothing` of the memory.
        checkpoint: The `checkpoint` of the consolidation.
        probe: The `probe` of the consolidation.

    Raises:
        TypeError: If `privacy` is not a `limpet.Privacy`.
        UnsupportedError: If an option is not supported with it.
    """
    if not isinstance(privacy, Privacy):
        raise TypeError(f"privacy must be a limpet.Privacy(epsilon, delta), not a {type(privacy).__name__}")
    refused = {
        "probe=": (probe is not None, "a probe stores inputs as they are: omit probe="),
        "checkpoint=": (checkpoint is not None, "a checkpoint contains sums without noise: omit checkpoint="),
        "smoothing=": (bool(smoothing), "its perturbations are measured without noise: use smoothing=0"),
        "strength='auto'": (memory.strength == "auto", "it measures losses without noise: pass a number"),
        "a sharded model": (memory.sharded, "consolidate in a single process, without fully_shard"),
        "a probe in the memory": (bool(memory.probes), "its file contains inputs already: make another memory"),
    }
    for option, (given, advice) in refused.items():
        if given:
            raise UnsupportedError(f"privacy= does not support {option}: {advice}")


def warn_of_exposed_inputs(fishers: Sequence[Fisher]) -> None:
    """Warn if inputs can be recovered from the curvature of a task."""
    exposed = sorted({name for fisher in fishers for name in fisher.exposed})
    if exposed:
        rows = min(fisher.rows for fisher in fishers if fisher.exposed)
        warn(
            f"a task of {rows:,} examples has fewer inputs than the input factor of {exposed[0]} has rows"
            + (f" (and of {len(exposed) - 1} more blocks)" if len(exposed) > 1 else "")
            + ", so the inputs can be recovered from the memory: treat its file like the data; if they are private, "
            "consolidate more examples, or pass privacy=limpet.Privacy(epsilon, delta) to consolidate",
            PrivacyWarning,
        )


def described(privacy: Sequence[Privacy | None]) -> dict[str, Any]:
    """Return the settings of a state that record the budgets of the tasks; none if no task is private."""
    if not any(privacy):
        return {}
    return {"privacy": [None if one is None else asdict(one) for one in privacy]}


def restored(recorded: Sequence[Any], tasks: int) -> tuple[Privacy | None, ...]:
    """Return the budgets of the tasks, the inverse of `described`; raises ValueError if they are not valid."""
    if not recorded:
        return (None,) * tasks
    if len(recorded) != tasks:
        raise ValueError(f"privacy has {len(recorded)} entries for {tasks} tasks")
    return tuple(None if one is None else Privacy(**one) for one in recorded)


def privacy_text(privacy: Sequence[Privacy | None]) -> str:
    """Return the part of a report's title that says what is private.

    Args:
        privacy: Budget of every task.

    Returns:
        The text, beginning with a comma; empty if no task is private.

    Examples:
        >>> privacy_text([Privacy(8, 1e-5), None])
        ', curvature private in 1 of 2 tasks (epsilon 8, delta 1e-05 each)'
    """
    private = [one for one in privacy if one is not None]
    if not private:
        return ""
    epsilon, delta = max(one.epsilon for one in private), max(one.delta for one in private)
    which = f" in {len(private)} of {len(privacy)} tasks" if len(private) < len(privacy) else ""
    most = "at most " if len(set(private)) > 1 else ""
    return f", curvature private{which} ({most}epsilon {epsilon:g}, delta {delta:g} each)"
