"""Plain names of modules and parameters: without wrappers of torch.compile, activation checkpointing and adapters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import nn

from limpet.errors import UnsupportedError
from limpet.model.adapters import is_adapted
from limpet.model.quantized import own_parameters

AROUND = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch gives the module inside a compiled one, and inside one with activation checkpointing."""

WRAPPERS = re.compile(rf"(?:^|\.)(?:{'|'.join(AROUND)}|base_layer|modules_to_save\.[^.]+)(?=\.|$)")


def plain(pattern: str) -> str:
    """Remove the names of wrappers from a name or pattern given by the user.

    Args:
        pattern: Name or pattern of a parameter or module.

    Returns:
        The plain name or pattern.

    Examples:
        >>> plain("_orig_mod.layers.0.q_proj.base_layer.weight")
        'layers.0.q_proj.weight'
    """
    return WRAPPERS.sub("", pattern).removeprefix(".")


def places(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (torch name, plain name, module) for all modules, in the order of `named_modules`.

    A module that is used in several places is yielded for each of them. This is a single loop for speed, because every
    training step needs the names of all parameters.
    """
    stack, inside = [("", "", model)], dict[str, str]()
    while stack:
        full, name, module = stack.pop()
        yield full, name, module
        if module._modules:
            inside.update((_joined(full, inner), name) for inner in _wrapped(module))
        for last, child in reversed(module._modules.items()):
            if child is not None:
                below = _joined(full, last)
                stack.append((below, inside[below] if below in inside else _joined(name, last), child))


def _joined(prefix: str, last: str) -> str:
    """Join two parts of a name."""
    return f"{prefix}.{last}" if prefix else last


def _wrapped(module: nn.Module) -> Iterator[str]:
    """Yield the relative names of the modules that a wrapper wraps."""
    children = module._modules
    yield from (name for name in AROUND if name in children)
    if "base_model" in children and hasattr(module, "peft_config"):
        yield "base_model.model"
    if "base_layer" in children and is_adapted(module):
        yield "base_layer"
    if "modules_to_save" in children and "original_module" in children:
        active = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ())
        yield f"modules_to_save.{active[0]}" if active else "original_module"


def replaced_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that a wrapper holds but does not run: an original, and its copies but for the active one."""
    found: set[nn.Module] = set()
    for wrapper in model.modules():
        if "modules_to_save" in wrapper._modules and "original_module" in wrapper._modules:
            (active,) = _wrapped(wrapper)
            found.update(wrapper.modules())
            found.difference_update(wrapper.get_submodule(active).modules())
    return found


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the plain name of every module, the first one for a module that is used in several places."""
    found: dict[nn.Module, str] = {}
    for _, name, module in places(model):
        found.setdefault(module, name)
    return found


class Names:
    """Mapping from the torch names of a model's parameters and buffers to their plain names.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {full: name for full, name, _ in places(model)}

    def __getitem__(self, full: str) -> str:
        module, _, last = full.rpartition(".")
        return _joined(self._modules[module], last)


def every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters with their plain names; a shared parameter is yielded once for each of its names."""
    for _, prefix, module in places(model):
        for last, parameter in own_parameters(module):
            yield _joined(prefix, last), parameter


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by plain name; a shared parameter is listed once.

    Args:
        model: The model.

    Returns:
        The parameters by name, in the order of the modules.

    Raises:
        UnsupportedError: If two parameters have the same plain name.
    """
    found: dict[str, nn.Parameter] = {}
    known: set[nn.Parameter] = set()
    for name, parameter in every_name(model):
        if parameter in known:
            continue
        if name in found:
            raise UnsupportedError(
                f"two parameters of the model are called {name} after removing the wrappers around their modules: "
                "pass the unwrapped model to the memory"
            )
        known.add(parameter)
        found[name] = parameter
    return found


def running_statistics(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the running statistics, buffers that training changes and no penalty protects."""
    names = Names(model)
    return {
        names[full]: tuple(buffer.shape)
        for full, buffer in model.named_buffers()
        if full.rpartition(".")[2] in ("running_mean", "running_var")
    }


def is_excluded(name: str, patterns: Collection[str]) -> bool:
    """Return whether a parameter is excluded.

    Args:
        name: Plain name of the parameter.
        patterns: Names of parameters or modules, or patterns such as `"heads.*"`.

    Returns:
        Whether one of the patterns matches the parameter or a module that contains it.
    """
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)
