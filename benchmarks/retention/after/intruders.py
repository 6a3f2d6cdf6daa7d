"""Intruder dimensions (Shuttleworth et al. 2024) are reduced, as in peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft.tuners.lora.intruders import reduce_intruder_dimension

from retention.method import After, Bench

LEFT = (0.75, 0.5, 0.25, 0.0)  # the share of an intruder dimension that is left; 0.75 is the default


def points(_: Bench, model: Any) -> Iterator[dict[str, Any]]:
    """From the default on, less and less of them."""
    name = model.active_adapters[0]
    for left in LEFT:
        reduce_intruder_dimension(model, name, "reduced", mitigation_lambda=left, logging_sink=None)  # type: ignore[no-untyped-call]
        try:
            yield {"left": left}
        finally:
            model.set_adapter(name)
            model.delete_adapter("reduced")


METHOD = After("intruder reduction", "nothing", points)
