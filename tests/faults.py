"""Errors of the operating system at the k-th call, for every k."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from limpet.errors import SaveError

CALLS: list[tuple[Any, str]] = [
    (os, "open"),
    (os, "fsync"),
    (os, "fstat"),
    (os, "fchmod"),
    (os, "close"),
    (os, "scandir"),
    (os, "link"),
    (fcntl, "flock"),
    (Path, "open"),
    (Path, "replace"),
    (Path, "unlink"),
]
"""What the writers call, besides `write`, `flush` and `close` of the files that `Path.open` returns."""
AFTERWARDS = ("close",)
"""Calls that have their effect even if they report an error."""


class Faults:
    """Raises an OSError at one call.

    Args:
        at: The number of the call, from 1 on.
        number: The error number.
    """

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number = at, number
        self.calls = 0
        self.failed = ""

    def count(self, name: str) -> None:
        """Count a call, and raise if it is the one."""
        self.calls += 1
        if self.calls == self.at:
            self.failed = name
            raise OSError(self.number, os.strerror(self.number))

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is counted."""

        def call(*args: Any, **options: Any) -> Any:
            if name in AFTERWARDS:
                function(*args, **options)
            self.count(name)
            if name in AFTERWARDS:
                return None
            found = function(*args, **options)
            return File(self, found) if hasattr(found, "write") else found

        return call

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Count the calls of the body."""
        patches = [mock.patch.object(owner, name, self.method(owner, name)) for owner, name in CALLS]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def method(self, owner: Any, name: str) -> Any:
        """The replacement of a function of a module, or of a method of a class."""
        wrapped = self.wrapped(name, getattr(owner, name))
        return (lambda *args, **options: wrapped(*args, **options)) if isinstance(owner, type) else wrapped


class File:
    """A file whose writes are counted."""

    def __init__(self, faults: Faults, file: Any) -> None:
        self._faults, self._file = faults, file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return self._faults.wrapped(name, found) if name in ("write", "flush", "close") else found

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def check_every_fault(path: Path, write: Callable[[], None], new: bytes) -> list[str]:
    """Check that a write leaves the old file or the new one, and nothing else, wherever it fails.

    Args:
        path: The file that is written, the only one in its folder. It has some other content.
        write: Writes it.
        new: What it then contains.

    Returns:
        The names of the calls that failed, in order.
    """
    old = path.read_bytes()
    assert old != new
    names = []
    for number in (errno.ENOSPC, errno.EIO):
        for k in range(1, 500):
            path.write_bytes(old)
            faults, raised = Faults(k, number), None
            with faults.installed():
                try:
                    write()
                except OSError as error:
                    raised = error
            content = path.read_bytes()
            where = f"call {k}, {faults.failed}: {raised}"
            assert content in (old, new), where
            assert [entry.name for entry in path.parent.iterdir()] == [path.name], where
            if raised is None:
                assert content == new, where
            else:
                assert isinstance(raised, SaveError) and raised.errno == number, where
                assert ("is unchanged" in str(raised)) == (content == old), where
                assert ("was written" in str(raised)) == (content == new), where
            if not faults.failed:
                break
            names.append(faults.failed)
        else:
            pytest.fail("the write never succeeded")
    path.write_bytes(old)
    write()
    assert path.read_bytes() == new
    return names
