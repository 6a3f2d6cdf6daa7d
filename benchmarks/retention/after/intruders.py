"""Intruder dimensions (Shuttleworth et al. 2024) are reduced, as in peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.intruders import reduce_intruder_dimension

from retention.method import After, Bench, Go


@contextmanager
def path(_: Bench, model: Any) -> Iterator[Go]:
    """From peft's default on, less and less of them."""
    name = model.active_adapters[0]

    def restore() -> None:
        model.set_adapter(name)
        if "reduced" in model.peft_config:
            model.delete_adapter("reduced")

    def go(left: float) -> None:
        restore()
        reduce_intruder_dimension(model, name, "reduced", mitigation_lambda=left, logging_sink=None)  # type: ignore[no-untyped-call]

    try:
        yield go
    finally:
        restore()


METHOD = After(
    "intruder reduction",
    "nothing",
    path,
    settings=(0.75, 0.5, 0.25, 0.0),  # the share of an intruder dimension that is left
    default=0.75,
    adapters_only=True,
)
