"""Checks of the model and the `exclude` argument of a memory, and warnings about unprotected state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from limpet.errors import LimpetWarning, NotProtectedWarning, UnsupportedError, warn
from limpet.model import Block, every_name, is_excluded, module_names, named_parameters, plain, running_statistics
from limpet.posterior import Posterior
from limpet.posterior.sharding import reject_sharded


def check_model(model: Any) -> None:
    """Raise unless `model` is a `torch.nn.Module` that supports hooks and has initialized parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("a scripted model does not support hooks: pass the model from before torch.jit.script")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedError(f"{name} is uninitialized: run one batch through the model first")


def excluded_names(model: nn.Module, exclude: Iterable[str | nn.Module | nn.Parameter]) -> tuple[str, ...]:
    """Resolve the `exclude` argument of a memory to names and patterns.

    Args:
        model: The model.
        exclude: Names, patterns, modules and parameters.

    Returns:
        Names and patterns unchanged; modules and parameters replaced by their names.

    Raises:
        ValueError: If a module or parameter is not part of the model.
    """
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
                warn(
                    f"exclude: {item!r} matches no parameter or module of the model: check the names in "
                    "model.named_parameters()",
                    LimpetWarning,
                )
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
    """Warn about state that no penalty protects: frozen parameters outside all blocks, and running statistics.

    Args:
        model: The model.
        blocks: The blocks that the memory protects.
    """
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


def reject_sharded_memory(posterior: Posterior, what: str) -> None:
    """Raise an error for a method that needs the whole memory in one process.

    Args:
        posterior: The posterior of the memory.
        what: The method, for the message.

    Raises:
        UnsupportedError: If the memory is sharded.
    """
    reject_sharded(posterior.sharding, f"memory.{what}(...)", "save the memory and load it in one process")
