"""Orthogonal subspace fine-tuning (Nayak et al. 2025), as in peft: the top singular directions do not train."""

from __future__ import annotations

from typing import Any

import peft

from retention.method import During


def wrapped(model: Any, value: float) -> Any:
    """The model with all linear layers decomposed, of which this share of the singular directions is frozen."""
    return peft.get_peft_model(model, peft.OSFConfig(target_modules="all-linear", effective_rank=value))


METHOD = During(
    "OSF",
    "nothing",
    candidates=(0.5, 0.9),  # the first is peft's default
    rate=lambda pair, _: pair.rate if pair.full else 0.05 * pair.rate,  # all weights train, which needs a lower one
    wrapped=wrapped,
)
