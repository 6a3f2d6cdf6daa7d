"""What a memory is given, looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from limpet.errors import LimpetWarning, NotProtectedWarning, UnsupportedError, warn
from limpet.model import Block, every_name, is_excluded, module_names, named_parameters, plain, running_statistics


def check_model(model: Any) -> None:
    """Refuse what is no model, or none that can be watched."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"limpet protects a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("a scripted model cannot be watched: give the model as it was before torch.jit.script")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedError(f"{name} has no shape yet: run one batch through the model first")


def excluded_names(model: nn.Module, exclude: Iterable[str | nn.Module | nn.Parameter]) -> tuple[str, ...]:
    """Names and patterns as they are; modules and parameters by their names."""
    if isinstance(exclude, str | nn.Module | nn.Parameter):
        exclude = [exclude]
    modules = module_names(model)
    parameters = dict(every_name(model))
    found = []
    for item in exclude:
        if isinstance(item, str):
            matches = [any(is_excluded(name, [pattern]) for name in parameters) for pattern in (item, plain(item))]
            found.append(item if matches[0] else plain(item))
            if item not in modules.values() and not any(matches):
                warn(f"exclude: {item!r} matches no parameter of the model", LimpetWarning)
        elif isinstance(item, nn.Module):
            if item not in modules or item is model:
                raise ValueError(f"exclude: this {type(item).__name__} is not a module inside the model")
            found.append(modules[item])
        else:
            names = [name for name, parameter in parameters.items() if parameter is item]
            if not names:
                raise ValueError(f"exclude: this {type(item).__name__} is not a parameter of the model")
            found.extend(names)
    return tuple(found)


def say_what_is_not_protected(model: nn.Module, blocks: Iterable[Block]) -> None:
    """Warn of what no penalty reaches: frozen parameters that no block has, and running statistics."""
    held = {name for block in blocks for name in block.parameters}
    named = named_parameters(model).items()
    frozen = [name for name, parameter in named if not parameter.requires_grad and name not in held]
    statistics = list(running_statistics(model))
    parts = []
    if frozen:
        parts.append(f"{len(frozen)} frozen parameters (such as {frozen[0]}); unfreeze them first if they will train")
    if statistics:
        parts.append(
            f"{len(statistics)} running statistics (such as {statistics[0]}), which follow the newest data; keep those "
            "modules in eval mode while you train"
        )
    if parts:
        warn(f"not protected: {'; '.join(parts)}. memory.report() lists all", NotProtectedWarning)
