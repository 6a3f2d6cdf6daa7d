"""The adapters of a model, and what they change scaled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn


def layers(model: Any) -> list[tuple[str, Any]]:
    """The layers with LoRA adapters, with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@contextmanager
def scaled(model: Any, factor: Callable[[str], float]) -> Iterator[None]:
    """Multiply the change that every adapter makes by a factor, and restore it.

    Args:
        model: A model with LoRA adapters.
        factor: The factor, for the name of a layer.
    """
    found: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    before = {name: parameter.detach().clone() for name, parameter in found.items()}
    try:
        with torch.no_grad():
            for name, parameter in found.items():
                parameter.mul_(factor(name))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in found.items():
                parameter.copy_(before[name])


def depth(name: str) -> int:
    """The number of the block that a layer is in."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])
