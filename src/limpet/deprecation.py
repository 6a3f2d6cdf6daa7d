"""Deprecated names: they keep working, with a DeprecationWarning that names the replacement."""

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
"""Moved modules: for each old name, the new module and the names inside it that have changed."""


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept keyword arguments under their deprecated names.

    Args:
        **names: The new name of each deprecated argument, as `old="new"`.

    Returns:
        A decorator. The decorated function raises TypeError if an argument is passed under both names.

    Examples:
        >>> @renamed_arguments(size="length")
        ... def double(length: int) -> int:
        ...     return 2 * length
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     double(size=3)
        6
        >>> print(caught[0].message)
        size= is deprecated: use length=
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{old}= is the deprecated name of {new}=: pass only {new}=")
                warnings.warn(f"{old}= is deprecated: use {new}=", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapped

    return decorate


def renamed_attribute(module: str, old: str, new: str) -> Any:
    """Look up a renamed module attribute under its new name, with a DeprecationWarning.

    Args:
        module: The full name of the module.
        old: The deprecated name of the attribute.
        new: Its current name.

    Returns:
        The attribute.
    """
    warnings.warn(f"{module}.{old} is deprecated: use {module}.{new}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new)


class _Moved(ModuleType):
    """A stand-in for a moved module, which looks its attributes up in the new one."""

    def __getattr__(self, name: str) -> Any:
        target, names = MODULES[self.__name__]
        return getattr(importlib.import_module(target), names.get(name, name))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for moved modules, so that `from limpet.language import remember` keeps working."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a moved module, None for any other."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Warn that the module has moved, and return its stand-in."""
        warnings.warn(f"{spec.name} is deprecated: use {MODULES[spec.name][0]}", DeprecationWarning, stacklevel=2)
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are looked up in the new module."""


def install() -> None:
    """Make moved modules importable under their old names. Calling it twice has no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
