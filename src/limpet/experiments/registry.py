"""Names for things that a person can add to: task sequences, networks, methods."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from limpet.errors import LimpetError

T = TypeVar("T")


class Registry(Generic[T]):
    """Things by name; adding one is a decorator, asking for an unknown one is an error that lists them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Add the decorated thing under this name."""

        def add(item: T) -> T:
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise LimpetError(f"there is no {self.kind} {name!r}{suggestion(name, self._items)}")
        return self._items[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, or all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    return f": did you mean {near[0]!r}?" if near else f": there are {', '.join(choices)}"


def load_file(path: str | Path) -> None:
    """Run a Python file of the user's own, which registers what it brings."""
    path = Path(path)
    if not path.is_file():
        raise LimpetError(f"there is no file {path}")
    name = f"limpet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LimpetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling processes look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise LimpetError(f"{path} could not be run: {type(error).__name__}: {error}") from error
