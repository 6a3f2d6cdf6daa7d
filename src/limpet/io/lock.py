"""Locks: one process at a time writes to a folder or a file.

A lock is a file that names its holder and is locked with flock(2). The kernel releases it when the process ends,
however it ends, so a killed process never blocks the next one. On a normal end the file is deleted while it is still
locked. Another process may have opened it before, and gets its lock afterwards: it finds that the file is not the one
at the path any more, and tries again.

Where flock does not exist (Windows, some network file systems), the lock is a file that only one process can create. A
killed process leaves it behind, and the error says to delete it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from limpet.errors import LimpetError
from limpet.io import flock

LOCK = "lock"
"""Name of the lock file of a folder."""
POLL_SECONDS = 0.1


class LockedError(LimpetError):
    """Another process writes to the same folder or file."""


class FileLock:
    """Lock on an output, held in the body of a `with` statement.

    Args:
        path: The lock file. Its folder must exist.
        target: What is locked, for the error message.
        wait: Number of seconds to wait for another process to release it.

    Raises:
        LockedError: On entering, if another process holds the lock.
    """

    def __init__(self, path: Path, target: Path, *, wait: float = 0.0) -> None:
        self.path, self.target, self.wait = path, target, wait
        self._file: int | None = None
        self._exclusive = path.with_name(f"{path.name}.exclusive")

    def __enter__(self) -> FileLock:
        deadline = time.monotonic() + self.wait
        while (holder := self._try()) is not None:
            if time.monotonic() >= deadline:
                raise LockedError(
                    f"{self.target} is in use by {holder}: wait until it has finished, or choose another output"
                )
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            self._exclusive.unlink(missing_ok=True)
            return
        self.path.unlink(missing_ok=True)  # before it is released: afterwards it may be the lock of another process
        os.close(self._file)
        self._file = None

    def _try(self) -> str | None:
        """Take the lock, or return a description of the process that holds it."""
        if flock.fcntl is None:
            return self._create()
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                supported = flock.lock(file, wait=False)
            except OSError as error:
                holder = _described(os.pread(file, 1000, 0))
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return holder
                raise
            if not supported:
                os.close(file)
                self.path.unlink(missing_ok=True)  # it has no meaning on this file system
                return self._create()
            if self._is_current(file):
                self._file = file
                with suppress(OSError):  # a full disk: the lock is valid without the name of its holder
                    os.ftruncate(file, 0)
                    os.pwrite(file, _own_name(), 0)
                return None
            os.close(file)  # its holder deleted it between our opening and locking it

    def _is_current(self, file: int) -> bool:
        """Whether the open file is the one at the path."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def _create(self) -> str | None:
        try:
            with self._exclusive.open("xb") as file:
                file.write(_own_name())
        except FileExistsError:
            with suppress(FileNotFoundError):
                holder = _described(self._exclusive.read_bytes())
                return f"{holder} (if that process has ended, delete {self._exclusive})"
            return self._create()  # deleted in the meantime
        return None


def _own_name() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _described(content: bytes) -> str:
    """Describe the holder from the content of a lock file, which may not have been written yet."""
    try:
        holder = json.loads(content)
        return f"process {int(holder['pid'])} on {str(holder['host'])!r}"
    except (ValueError, TypeError, KeyError):
        return "another process"


@contextmanager
def folder_lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Create a folder if necessary and lock it. If the body leaves a folder that was created here empty, it is deleted.

    Args:
        folder: The folder.
        wait: Number of seconds to wait for another process to release it.

    Yields:
        Nothing; the lock is held in the body.

    Raises:
        LockedError: If another process holds the lock.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / LOCK, folder, wait=wait)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.__enter__()
            break
        except FileNotFoundError:  # deleted in the meantime by a process that had created it, too
            continue
        except FileExistsError:  # the same, between two calls in `mkdir`, unless it is a file
            if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
                raise
    try:
        yield
    finally:
        lock.__exit__()
        with suppress(OSError):  # not empty
            for path in created:
                path.rmdir()
