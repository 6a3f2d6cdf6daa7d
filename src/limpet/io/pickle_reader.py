"""Read what a pickle says without doing what it says.

A pickle is a program: it looks up functions and classes by name, calls them, and sets attributes of the results. This
reader runs that program on descriptions only. A name stays a `Name`, a call or an instance becomes a `Record`, a dict a
list of pairs, and a set a list. Nothing is imported, called, hashed or assigned to, so there is nothing that a hostile
pickle could reach.

Source of the opcodes: `pickletools` of the standard library.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from limpet.errors import MemoryFileError

MAX_BYTES = 64_000_000
MAX_OPCODES = 10_000_000
"""Limits for one pickle. An opcode takes at least one byte and makes at most one empty container of 64 bytes."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class or function that the pickle refers to.

    Attributes:
        name: Module and qualified name, such as "torch.float32".
    """

    name: str


@dataclass(eq=False)
class Record:
    """A call or an instance.

    Attributes:
        name: Module and qualified name of the function or class.
        args: The arguments.
        state: What the pickle would restore the instance's attributes from, None if nothing.
        items: What the pickle would append, or set by key, in an instance of a subclass of list or dict.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list, repr=False)


@dataclass(eq=False)
class Pairs:
    """A dict, as pairs of keys and values in the order of the pickle.

    Attributes:
        items: The pairs.
    """

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Reference:
    """An object stored outside of the pickle, such as the storage of a tensor.

    Attributes:
        key: What identifies it.
    """

    key: Any


def read(data: bytes) -> Any:
    """Read a pickle as plain values and descriptions.

    Args:
        data: The pickle. Bytes after its end are ignored.

    Returns:
        None, a bool, number, string, bytes, list, tuple, `Pairs`, `Name`, `Record` or `Reference`.

    Raises:
        MemoryFileError: If the pickle is damaged, too large, or uses opcodes that `pickle.dumps` does not write for
            plain data and instances.

    Examples:
        >>> import os, pickle
        >>> class Harm:
        ...     def __reduce__(self):
        ...         return os.getcwd, ()
        >>> read(pickle.dumps(Harm()))
        Record(name='posix.getcwd', args=(), state=None)
    """
    if len(data) > MAX_BYTES:
        raise MemoryFileError(f"a pickle of {len(data):,} bytes is larger than the limit of {MAX_BYTES:,}")
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise ValueError(f"more than {MAX_OPCODES:,} opcodes")
            machine.step(opcode.name, argument)
        (result,) = machine.stack
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise MemoryFileError(f"a pickle cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
    return result


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BINBYTES", "BINBYTES8", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINUNICODE", "BINUNICODE8", "FLOAT", "INT",
    "LONG", "LONG1", "LONG4", "SHORT_BINBYTES", "SHORT_BINUNICODE", "UNICODE",
}  # fmt: skip
_IGNORED = {"PROTO", "FRAME", "STOP"}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": Pairs,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT, _GET = {"BINPUT", "LONG_BINPUT", "PUT"}, {"BINGET", "LONG_BINGET", "GET"}


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under the marks
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Run one opcode."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(self._take(_TUPLES[name]))
        elif name in _GET:
            self.stack.append(self._memo[int(argument)])
        elif name in _PUT:
            self._memo[int(argument)] = self.stack[-1]
        elif name not in _IGNORED:
            run = getattr(self, f"_{name.lower()}", None)
            if run is None:
                raise ValueError(f"opcode {name}")
            run(argument)

    def _take(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        taken = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return taken

    def _mark(self, _: Any) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _marked(self) -> list[Any]:
        """Everything since the last mark, which is removed."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _tuple(self, _: Any) -> None:
        found = self._marked()
        self.stack.append(tuple(found))

    def _list(self, _: Any) -> None:
        found = self._marked()
        self.stack.append(found)

    def _dict(self, _: Any) -> None:
        found = self._marked()
        self.stack.append(Pairs(list(zip(found[::2], found[1::2], strict=True))))

    def _list_on_top(self) -> list[Any]:
        found = self.stack[-1]
        return found.items if isinstance(found, Record) else _expect(found, list)

    def _append(self, _: Any) -> None:
        (value,) = self._take(1)
        self._list_on_top().append(value)

    def _appends(self, _: Any) -> None:
        values = self._marked()
        self._list_on_top().extend(values)

    _additems = _appends

    def _setitem(self, _: Any) -> None:
        key, value = self._take(2)
        _expect(self.stack[-1], Pairs, Record).items.append((key, value))

    def _setitems(self, _: Any) -> None:
        found = self._marked()
        _expect(self.stack[-1], Pairs, Record).items.extend(zip(found[::2], found[1::2], strict=True))

    def _global(self, argument: str) -> None:
        self.stack.append(Name(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        module, name = (_expect(part, str) for part in self._take(2))
        self.stack.append(Name(f"{module}.{name}"))

    def _reduce(self, _: Any) -> None:
        function, args = self._take(2)
        self.stack.append(Record(_expect(function, Name).name, _expect(args, tuple)))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        self._take(1)  # keyword arguments
        self._reduce(None)

    def _build(self, _: Any) -> None:
        (state,) = self._take(1)
        _expect(self.stack[-1], Record).state = state

    def _binpersid(self, _: Any) -> None:
        self.stack.append(Reference(*self._take(1)))


def _expect(value: Any, *kinds: type[Any]) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"expected a {kinds[0].__name__}, found a {type(value).__name__}")
    return value
