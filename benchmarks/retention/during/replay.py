"""Replay of old text: one old example in every batch, from a small pool that was kept."""

from __future__ import annotations

from typing import Any

from retention.method import Bench, During, Extra


def extra(bench: Bench, model: Any, value: float) -> Extra:
    """The loss on an old example."""
    return lambda *_: bench.old_loss(model, value)


METHODS = tuple(During(f"replay of {share:.0%}", "old data", fixed=share, extra=extra) for share in (0.01, 0.05))
