"""Names as the user's model had them before torch.compile, checkpointing and adapters were put around its modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn

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


class Names:
    """The plain names of one model's modules and parameters: only what really is a wrapper is left out of them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {"": ""}  # by the name that torch has for them
        for name, module in model.named_modules(remove_duplicate=False):
            own = self.modules.setdefault(name, self._beside(name))
            for inner in _wrapped(module):
                self.modules[f"{name}.{inner}".removeprefix(".")] = own

    def _beside(self, name: str) -> str:
        parent, _, last = name.rpartition(".")
        return f"{self.modules[parent]}.{last}".removeprefix(".")

    def __getitem__(self, parameter: str) -> str:
        """The plain name of a parameter or buffer."""
        return self._beside(parameter)


def _wrapped(module: nn.Module) -> Iterator[str]:
    """Where inside of a module the one is that it stands for."""
    yield from (name for name in AROUND if name in module._modules)
    if is_adapted(module):
        yield "base_layer"
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict) and "original_module" in module._modules:
        active = getattr(module, "active_adapters", list(copies))
        yield from (f"modules_to_save.{name}" for name in active[:1] if name in copies)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by their plain names, shared ones once."""
    names, found = Names(model), dict[str, nn.Parameter]()
    for full, parameter in model.named_parameters():
        name = names[full]
        if name in found:
            raise UnsupportedError(
                f"two parameters of the model are called {name} once the wrappers around their modules are left out: "
                "give the memory the model inside of them"
            )
        found[name] = parameter
    return found


def every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All plain names of all parameters, shared ones by each of theirs."""
    names = Names(model)
    return ((names[full], parameter) for full, parameter in model.named_parameters(remove_duplicate=False))


def running_statistics(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The buffers that training moves and no penalty reaches, with their shapes."""
    names = Names(model)
    return {
        names[full]: tuple(buffer.shape)
        for full, buffer in model.named_buffers()
        if isinstance(buffer, Tensor) and full.rpartition(".")[2] in ("running_mean", "running_var")
    }


def is_excluded(name: str, patterns: Collection[str]) -> bool:
    """Whether a parameter is left out: by its name, by a module it is in, or by a pattern such as "heads.*"."""
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)
