"""Registries of task sequences, networks and methods, which users can extend."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from limpet.errors import LimpetError

T = TypeVar("T")


class Registry(Generic[T]):
    """Mapping from names to registered objects; looking up an unknown name raises an error that lists the known ones.

    Args:
        kind: What is registered, for error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under this name."""

        def add(item: T) -> T:
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise LimpetError(f"unknown {self.kind} {name!r}{suggestion(name, self._items)}")
        return self._items[name]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._items)


METHODS: Registry[type[Any]] = Registry("method")
"""Subclasses of `limpet.experiments.methods.Method`. Here, because presets need to know which derives from which."""


def lineage(name: str) -> list[str]:
    """Return the registered methods that a method derives from, the most general first, and the method itself.

    Presets apply their settings in this order. The class that all methods derive from does not count, although it is
    registered itself, as "fine-tuning".

    Args:
        name: Name of the method.

    Returns:
        The names.

    Raises:
        LimpetError: If there is no such method.

    Examples:
        >>> import limpet.experiments.methods
        >>> lineage("repair-rounds"), lineage("si")
        (['repair', 'repair-rounds'], ['si'])
    """
    known = {METHODS[one]: one for one in METHODS.names()}
    inherited = [kind for kind in reversed(METHODS[name].__mro__[1:]) if kind in known]
    return [*(known[kind] for kind in inherited if not all(issubclass(one, kind) for one in known)), name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known name, or all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    return f": did you mean {near[0]!r}?" if near else f": choose from {', '.join(choices)}"


def load_file(path: str | Path) -> None:
    """Execute a user's Python file, which registers its methods, networks or task sequences."""
    path = Path(path)
    if not path.is_file():
        raise LimpetError(f"file not found: {path}")
    name = f"limpet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LimpetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise LimpetError(f"{path} could not be executed: {type(error).__name__}: {error}") from error
