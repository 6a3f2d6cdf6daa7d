"""Names as the user's model had them before torch.compile, checkpointing and adapters were put around its modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from limpet.errors import UnsupportedError
from limpet.layers.adapters import is_adapted

AROUND = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch calls the module inside of a compiled one, and of one whose activations are computed again."""

WRAPPERS = re.compile(rf"(?:^|\.)(?:{'|'.join(AROUND)}|base_layer|modules_to_save\.[^.]+)(?=\.|$)")


def plain(pattern: str) -> str:
    """A name or pattern that somebody gave, without what may be around modules.

    >>> plain("_orig_mod.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return WRAPPERS.sub("", pattern).removeprefix(".")


Place = tuple[str, str, nn.Module]
"""A module with its name in torch, and its plain one."""


def places(model: nn.Module) -> Iterator[Place]:
    """All modules in the order of `named_modules`, one that is used in several places in each of them.

    Written as one loop, because every step asks for the names of all parameters.
    """
    stack: list[tuple[Place, Mapping[str, str]]] = [(("", "", model), {})]
    while stack:
        place, stand_ins = stack.pop()
        yield place
        full, plain_name, module = place
        if not module._modules:
            continue
        inner = _wrapped(module)
        for name, child in reversed(module._modules.items()):
            if child is None:
                continue
            below = f"{full}.{name}" if full else name
            own = stand_ins.get(name)
            if own is None:
                own = plain_name if name in inner else f"{plain_name}.{name}" if plain_name else name
            copies = dict.fromkeys(inner.get(name, ()), plain_name)
            stack.append(((below, f"{own}.{name}".removeprefix(".") if copies else own, child), copies))


def _wrapped(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The children that a module stands for: themselves, or those of theirs that are named."""
    children = module._modules
    found: dict[str, tuple[str, ...]] = {name: () for name in AROUND if name in children}
    if "base_layer" in children and is_adapted(module):
        found["base_layer"] = ()
    if "modules_to_save" in children and "original_module" in children:
        active = getattr(module, "active_adapters", ())
        found["modules_to_save"] = tuple(active[:1])
    return found


class Names:
    """The plain names of one model's modules and parameters: only what really is a wrapper is left out of them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {full: name for full, name, _ in places(model)}  # by the name that torch has for them

    def __getitem__(self, parameter: str) -> str:
        """The plain name of a parameter or buffer."""
        module, _, last = parameter.rpartition(".")
        return f"{self.modules[module]}.{last}".removeprefix(".")


def every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All plain names of all parameters, shared ones by each of theirs."""
    for _, prefix, module in places(model):
        for last, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{last}" if prefix else last, parameter


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
