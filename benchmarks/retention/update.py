"""What training has changed, layer by layer, and how to change it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Its name.
        weight: The parameter that is changed: that of the base if the layer has an adapter.
        update: What training has added to the weight, in the adapter or in the parameter itself.
    """

    name: str
    weight: nn.Parameter
    update: Tensor


Rule = Callable[[Layer], Tensor]
"""What to have instead of the update of a layer."""


def adapted_layers(model: Any) -> dict[str, Any]:
    """The layers with LoRA adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def adapter_updates(model: Any) -> list[Layer]:
    """What the active adapter of every layer adds to its weight."""
    return [
        Layer(name, layer.get_base_layer().weight, layer.get_delta_weight(layer.active_adapters[0]))
        for name, layer in adapted_layers(model).items()
    ]


@torch.no_grad()
def weight_updates(model: Any, before: Mapping[str, Tensor]) -> list[Layer]:
    """How far every parameter is from where it was, for those that were there before."""
    return [
        Layer(name, parameter, parameter - before[name])
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name in before
    ]


def squared_distance(model: Any, before: Mapping[str, Tensor]) -> Tensor:
    """The squared distance of what trains from where it was, for the parameters that were there before."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name in before}
    return torch.stack([(p - before[name]).square().sum() for name, p in trained.items()]).sum()


@contextmanager
def changing(layers: Sequence[Layer]) -> Iterator[Callable[[Rule], None]]:
    """Within the block, `change(rule)` replaces the updates; when it ends, they are as they were.

    Args:
        layers: The layers, with their updates.

    Yields:
        The function.
    """
    trained = [layer.weight.detach().clone() for layer in layers]

    @torch.no_grad()
    def change(rule: Rule) -> None:
        for layer, weight in zip(layers, trained, strict=True):
            layer.weight.copy_(weight + (rule(layer) - layer.update))

    try:
        yield change
    finally:
        change(lambda layer: layer.update)


def depths(names: Sequence[str]) -> dict[str, int]:
    """The depth of every layer, in the order of the model.

    Args:
        names: Their names.

    Returns:
        By name, the number of its block; of a layer outside of all blocks that of the one before it, 0 for the first.
        The place among the layers if no name has a number.
    """
    numbers = [re.search(r"\.layers?\.(\d+)\.", name) for name in names]
    if not any(numbers):
        return {name: place for place, name in enumerate(names)}
    found, depth = dict[str, int](), 0
    for name, number in zip(names, numbers, strict=True):
        depth = depth if number is None else int(number[1])
        found[name] = depth
    return found
