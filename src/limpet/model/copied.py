"""A copy of a model that does not call the model itself.

`copy.deepcopy` copies functions by reference. If one was put in the place of a method, as `model.forward =
torch.compile(model.forward)` does, the copy would run the weights of the model that it was copied from.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from limpet.errors import UnsupportedError


def independent_copy(model: nn.Module) -> nn.Module:
    """Copy a model.

    A compiled `forward` is replaced by the method that was compiled.

    Args:
        model: The model.

    Returns:
        The copy.

    Raises:
        UnsupportedError: If a function in the model calls the model, because the copy would call it as well.
    """
    copied, own = copy.deepcopy(model), set(model.modules())
    for (name, _), module in zip(model.named_modules(), copied.modules(), strict=True):
        for attribute, value in list(vars(module).items()):
            if not _refers_to(value, own):
                continue
            if attribute == "forward" and _compiled_method(value) is type(module).forward:
                del module.forward
                continue
            where = f"{name}.{attribute}" if name else attribute
            raise UnsupportedError(
                f"{where} is a function that calls the model itself, and so would a copy of the model: call the model "
                "under a context (with torch.autocast(...): model(x)) or compile it with model.compile() instead, or "
                "train adapters alone, whose reference needs no copy"
            )
    return copied


def _compiled_method(function: Any) -> Any:
    """The method that `torch.compile` made this function from, not bound to a module; None if it made none."""
    given = getattr(function, "_torchdynamo_orig_callable", None)
    if isinstance(given, FunctionType) and "_dynamo" in given.__code__.co_filename:
        given = getattr(given, "__wrapped__", None)  # which torch puts around the methods of its own layers
    return getattr(given, "__func__", None)


def _refers_to(value: Any, modules: Collection[nn.Module]) -> bool:
    """Whether a function has one of these modules in what it was made of."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, MethodType):
            waiting += [found.__self__, found.__func__]
        elif isinstance(found, functools.partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, FunctionType):
            cells = [cell.cell_contents for cell in found.__closure__ or () if _filled(cell)]
            waiting += [*cells, *(found.__defaults__ or ()), getattr(found, "__wrapped__", None)]
        elif isinstance(found, nn.Module) and found in modules:
            return True
    return False


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that is assigned later
        return False
    return True
