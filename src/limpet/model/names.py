"""Names as the user's model had them before torch.compile, checkpointing and adapters were put around its modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import nn

from limpet.errors import UnsupportedError
from limpet.model.adapters import is_adapted

AROUND = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch calls the module inside of a compiled one, and of one whose activations are computed again."""

WRAPPERS = re.compile(rf"(?:^|\.)(?:{'|'.join(AROUND)}|base_layer|modules_to_save\.[^.]+)(?=\.|$)")


def plain(pattern: str) -> str:
    """A name or pattern that somebody gave, without what may be around modules.

    >>> plain("_orig_mod.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return WRAPPERS.sub("", pattern).removeprefix(".")


def places(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """All modules with their names in torch and their plain ones, in the order of `named_modules`.

    One that is used in several places stands in each of them. Written as one loop, because every step asks for the
    names of all parameters.
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
    return f"{prefix}.{last}" if prefix else last


def _wrapped(module: nn.Module) -> Iterator[str]:
    """Where inside of a module the one is that it stands for."""
    children = module._modules
    yield from (name for name in AROUND if name in children)
    if "base_layer" in children and is_adapted(module):
        yield "base_layer"
    if "modules_to_save" in children and "original_module" in children:
        yield from (f"modules_to_save.{name}" for name in getattr(module, "active_adapters", ())[:1])


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """The plain name of every module, the first one of those that are used in several places."""
    found: dict[nn.Module, str] = {}
    for _, name, module in places(model):
        found.setdefault(module, name)
    return found


class Names:
    """The plain names of one model's parameters and buffers, by the names that torch has for them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {full: name for full, name, _ in places(model)}

    def __getitem__(self, full: str) -> str:
        module, _, last = full.rpartition(".")
        return _joined(self._modules[module], last)


def every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All plain names of all parameters, shared ones by each of theirs."""
    for _, prefix, module in places(model):
        for last, parameter in module._parameters.items():
            if parameter is not None:
                yield _joined(prefix, last), parameter


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by their plain names, shared ones once."""
    found: dict[str, nn.Parameter] = {}
    known: set[nn.Parameter] = set()
    for name, parameter in every_name(model):
        if parameter in known:
            continue
        if name in found:
            raise UnsupportedError(
                f"two parameters of the model are called {name} once the wrappers around their modules are left out: "
                "give the memory the model inside of them"
            )
        known.add(parameter)
        found[name] = parameter
    return found


def running_statistics(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The buffers that training moves and no penalty reaches, with their shapes."""
    names = Names(model)
    return {
        names[full]: tuple(buffer.shape)
        for full, buffer in model.named_buffers()
        if full.rpartition(".")[2] in ("running_mean", "running_var")
    }


def is_excluded(name: str, patterns: Collection[str]) -> bool:
    """Whether a parameter is left out: by its name, by a module it is in, or by a pattern such as "heads.*"."""
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)
