"""Old names that still work: each raises a DeprecationWarning that says what to write instead."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "limpet.calibration": ("limpet.forgetting.loss_curve", {"History": "TaskHistory", "Known": "TaskRecord"}),
    "limpet.dcp": ("limpet.io.dcp", {}),
    "limpet.forecast": ("limpet.forgetting.forecast", {}),
    "limpet.inspection": ("limpet.methods.inspect", {"BlockFacts": "BlockInspection"}),
    "limpet.language": (
        "limpet.integrations.causal_lm",
        {"remember": "consolidate_lm", "rows": "pack_tokens", "texts": "iter_texts"},
    ),
    "limpet.parallel": ("limpet.distributed", {"Shared": "ReplicatedBatches"}),
    "limpet.plan": ("limpet.planning.plan", {}),
}
"""Modules that have moved: the new module, and the names in it that have changed."""


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keyword arguments under the names that they used to have.

    Args:
        **names: The new name of every old one.

    Returns:
        A decorator.

    >>> @renamed_arguments(size="length")
    ... def double(length: int) -> int:
    ...     return 2 * length
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     double(size=3)
    6
    >>> print(said[0].message)
    size= is now called length=
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{old}= is the old name of {new}=: give one of them")
                warnings.warn(f"{old}= is now called {new}=", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapped

    return decorate


def renamed_attribute(module: str, old: str, new: str) -> Any:
    """The attribute of a module that used to have another name."""
    warnings.warn(f"{module}.{old} is now called {module}.{new}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new)


class _Moved(ModuleType):
    """A module under the name that it used to have."""

    def __getattr__(self, name: str) -> Any:
        target, names = MODULES[self.__name__]
        return getattr(importlib.import_module(target), names.get(name, name))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds moved modules, so that `from limpet.language import remember` goes on working."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is now called {MODULES[spec.name][0]}", DeprecationWarning, stacklevel=2)
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: attributes are looked up in the new module."""


def install() -> None:
    """Make moved modules importable under their old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
