"""Switch the adapters of a model off and on, to compute what it would compute without them.

PEFT's own `disable_adapter` also changes which parameters require gradients. Here only the flag is set that the forward
passes of PEFT's layers read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from limpet.errors import UnsupportedError
from limpet.model.adapters import adapted_parameters, is_adapted

FLAG = "_disable_adapters"


def _switches(model: nn.Module) -> list[Any]:
    """Return the layers of PEFT that can be switched off: adapted layers, and copies of layers to train whole."""
    return [module for module in model.modules() if isinstance(getattr(module, FLAG, None), bool)]


def _inner(switch: Any) -> nn.Module | None:
    """Return the layer that is used alone while a switch is off."""
    found = getattr(switch, "base_layer", None) or getattr(switch, "original_module", None)
    return found if isinstance(found, nn.Module) else None


def only_adapters_train(model: nn.Module) -> bool:
    """Return whether every trainable parameter belongs to an adapter, so that switching them off undoes all training.

    Args:
        model: The model.

    Returns:
        False also if the model has no adapters, or if one is merged into its base weight.
    """
    switches = _switches(model)
    if not switches or any(getattr(switch, "merged", False) for switch in switches):
        return False
    bases = {id(p) for switch in switches if (inner := _inner(switch)) is not None for p in inner.parameters()}
    off = {id(parameter) for switch in switches for parameter in switch.parameters()} - bases
    return all(id(parameter) in off for parameter in model.parameters() if parameter.requires_grad)


@torch.no_grad()
def adapters_change_nothing(model: nn.Module) -> bool:
    """Return whether the model computes the same with its adapters as without, as after their usual initialization.

    Args:
        model: The model.

    Returns:
        False also if that cannot be told from the parameters, as for adapters other than LoRA.
    """
    try:
        adapted = adapted_parameters(model)
    except UnsupportedError:
        return False
    for switch in _switches(model):
        inner = _inner(switch)
        if is_adapted(switch):
            continue
        kept = getattr(switch, "modules_to_save", None)
        if inner is None or not isinstance(kept, nn.ModuleDict):
            return False
        original = inner.state_dict()
        for copy in kept.values():
            if not all(torch.equal(tensor, original[name]) for name, tensor in copy.state_dict().items()):
                return False
    updates = [update for some in adapted.values() for update in some]
    return all(not bool(update.a.any()) or not bool(update.b.any()) for update in updates)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run the body with all adapters switched off.

    Args:
        model: The model.
    """
    switches = [(switch, switch.__dict__.get(FLAG)) for switch in _switches(model)]
    try:
        for switch, _ in switches:
            switch.__dict__[FLAG] = True
        yield
    finally:
        for switch, flag in switches:
            if flag is None:  # it was an attribute of the class
                del switch.__dict__[FLAG]
            else:
                switch.__dict__[FLAG] = flag
