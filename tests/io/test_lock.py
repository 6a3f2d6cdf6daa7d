"""Test locks: one holder at a time, named in the error, released by the kernel, and no file left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limpet.io import lock
from limpet.io.lock import FileLock, LockedError, folder_lock


def child(body: Callable[[], None]) -> int:
    """Run a function in a process of its own; its exit status is 0 unless it raises."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    finally:
        os._exit(status)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["flock", "no fcntl", "no locks on the file system"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The systems that a lock works on."""
    if request.param == "no fcntl":
        monkeypatch.setattr("limpet.io.flock.fcntl", None)
    if request.param == "no locks on the file system":

        def flock(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr("fcntl.flock", flock)
    return str(request.param)


def test_the_second_process_fails_at_once_and_is_told_of_the_first(tmp_path: Path, system: str) -> None:
    path, told = tmp_path / "lock", tmp_path / "told"
    started = time.monotonic()
    with FileLock(path, tmp_path):
        holder = os.getpid()

        def second() -> None:
            with pytest.raises(LockedError) as error, FileLock(path, tmp_path):
                raise AssertionError
            told.write_text(str(error.value))

        assert os.waitpid(child(second), 0)[1] == 0
    text = told.read_text()
    assert f"{tmp_path} is in use by process {holder} on {socket.gethostname()!r}" in text and "\n" not in text
    assert ("delete" in text) == (system != "flock")
    assert time.monotonic() < started + 5
    assert [one.name for one in tmp_path.iterdir()] == ["told"]
    with FileLock(path, tmp_path):  # free again
        pass


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def hold() -> None:
        with FileLock(path, tmp_path):
            (tmp_path / "held").touch()
            time.sleep(60)

    pid = child(hold)
    wait_for(tmp_path / "held")
    with pytest.raises(LockedError, match=f"process {pid} on"), FileLock(path, tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert path.exists()  # nobody could delete it
    with FileLock(path, tmp_path):
        assert f'"pid": {os.getpid()}' in path.read_text()
    assert not path.exists()


def test_without_flock_the_error_says_which_file_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.io.flock.fcntl", None)
    left = tmp_path / "lock.exclusive"
    left.write_bytes(b'{"pid": 1')  # of a process that was killed
    with pytest.raises(LockedError, match=rf"another process \(if that process has ended, delete {left}\)"):
        FileLock(tmp_path / "lock", tmp_path).__enter__()
    left.unlink()
    with FileLock(tmp_path / "lock", tmp_path):
        assert left.exists()
    assert not left.exists()


def test_waiting(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock", tmp_path):
        pid = child(lambda: FileLock(tmp_path / "lock", tmp_path, wait=20).__enter__() and None)
        time.sleep(0.3)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert os.waitpid(pid, 0)[1] == 0


def test_many_processes_that_take_and_delete_the_lock(tmp_path: Path, system: str) -> None:
    """A counter that is read and written without any other protection: no increment may be lost."""
    counter, times, processes = tmp_path / "counter", 40, 4
    counter.write_text("0")

    def count() -> None:
        for _ in range(times):
            with FileLock(tmp_path / "lock", tmp_path, wait=60):
                value = int(counter.read_text())
                time.sleep(0)
                counter.write_text(str(value + 1))

    lock.POLL_SECONDS, before = 0.0, lock.POLL_SECONDS
    try:
        pids = [child(count) for _ in range(processes)]
    finally:
        lock.POLL_SECONDS = before
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    assert counter.read_text() == str(times * processes)
    assert [one.name for one in tmp_path.iterdir()] == ["counter"]


def test_a_folder_that_stays_empty_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(KeyError), folder_lock(folder):
        assert (folder / "lock").exists()
        raise KeyError
    assert not (tmp_path / "a").exists()
    with folder_lock(folder):
        (folder / "file").touch()
    assert [one.name for one in folder.iterdir()] == ["file"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with folder_lock(empty):
        pass
    assert empty.is_dir()  # it was there before


def test_many_processes_that_create_and_delete_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"

    def create() -> None:
        for _ in range(40):
            with folder_lock(folder, wait=60):
                pass

    lock.POLL_SECONDS, before = 0.0, lock.POLL_SECONDS
    try:
        pids = [child(create) for _ in range(3)]
    finally:
        lock.POLL_SECONDS = before
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 3
    assert not folder.exists() or not list(folder.iterdir())


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)), folder_lock(tmp_path / "a"):
        pass
    with pytest.raises((FileExistsError, NotADirectoryError)), folder_lock(tmp_path / "a" / "b"):
        pass


def test_a_folder_that_is_deleted_while_it_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = Path.mkdir, []

    def mkdir(path: Path, *given: Any, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:  # it was there for os.mkdir, and is not for the check that it is a folder
            raise FileExistsError(path)
        made(path, *given, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with folder_lock(tmp_path / "a"):
        assert (tmp_path / "a").is_dir()
    assert len(calls) > 1
