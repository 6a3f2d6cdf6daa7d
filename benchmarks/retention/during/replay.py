"""Replay: a few old examples in every batch, from a small pool that was kept."""

from __future__ import annotations

from typing import Any

from retention.method import Bench, During, Extra


def extra(bench: Bench, model: Any, value: float) -> Extra:
    """The loss on old examples, each of which counts as much as one of the batch."""
    return lambda _, outputs: bench.old_loss(model, value) / len(outputs)


METHODS = tuple(During(f"replay of {share:.0%}", "old data", fixed=share, extra=extra) for share in (0.01, 0.05))
