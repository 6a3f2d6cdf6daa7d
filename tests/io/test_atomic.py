"""Files are replaced as a whole: faults at every call, full disks, permissions, links, and killed writers."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import limpet
from faults import Faults, check_every_fault
from limpet.distributed import Ranks
from limpet.errors import SaveError
from limpet.io import atomic, sharded_tensor_file, tensor_file

STALE = ".m.txt.0123456789abcdef.tmp"


class OnlyRank(Ranks):
    """A process group of one rank."""

    def gather(self, value: Any, what: str = "") -> list[Any]:
        return [value]


def memory_of(width: int = 5) -> limpet.OnlineLaplace:
    torch.manual_seed(0)
    memory = limpet.OnlineLaplace(nn.Linear(width, 3))
    memory.consolidate([(torch.randn(8, width), torch.randint(0, 3, (8,)))], progress=False)
    return memory


def writers() -> dict[str, Callable[[Path], None]]:
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3)}
    memory = memory_of()

    def weights(path: Path) -> None:
        from limpet.experiments.record import RunFolder

        folder = RunFolder(path.parent)
        folder.model = path
        folder.save_model(memory.model)

    return {
        "memory": memory.save,
        "tensors": lambda path: tensor_file.write(path, "test", {"a": 1}, tensors),
        "sharded": lambda path: sharded_tensor_file.write(path, "test", {"a": 1}, tensors, OnlyRank(0, 1)),
        "text": lambda path: atomic.write_text(path, "new text"),
        "model": weights,
    }


def written(write: Callable[[Path], None], folder: Path) -> bytes:
    folder.mkdir()
    write(folder / "f")
    return (folder / "f").read_bytes()


@pytest.mark.parametrize("kind", ["memory", "tensors", "sharded", "text", "model"])
def test_a_fault_at_any_call_leaves_the_old_file_or_the_new_one(kind: str, tmp_path: Path) -> None:
    write = writers()[kind]
    new = written(write, tmp_path / "new")
    path = tmp_path / "folder" / "f"
    path.parent.mkdir()
    path.write_bytes(b"old")
    failed = check_every_fault(path, lambda: write(path), new)
    assert {"open", "flock", "fsync", "replace"} <= set(failed)
    assert kind == "model" or "write" in failed  # safetensors writes the weights of a model itself


@pytest.mark.parametrize("at", range(1, 8))
def test_a_hard_link_replaces_or_leaves_the_file(at: int, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "f"
    path.write_bytes(b"old")
    faults = Faults(at, errno.EIO)
    with faults.installed():
        done = atomic.hard_link(tmp_path / "source", path)
    assert path.read_bytes() == b"new" if done else path.read_bytes() in (b"old", b"new")
    assert list(folder.iterdir()) == [path]
    assert atomic.hard_link(tmp_path / "source", path) and path.samefile(tmp_path / "source")
    assert atomic.hard_link(tmp_path / "source", path) and path.samefile(tmp_path / "source")
    assert not atomic.hard_link(tmp_path / "none", path) and path.read_bytes() == b"new"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse to write more than so many bytes to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["memory", "sharded", "text", "model"])
def test_a_write_that_the_kernel_cuts_off_anywhere(kind: str, tmp_path: Path) -> None:
    write = writers()[kind]
    new = written(write, tmp_path / "new")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "f"
    path.write_bytes(b"old")
    for size in range(0, len(new), max(1, len(new) // 100)):
        with largest_file(size), pytest.raises(SaveError) as raised:
            write(path)
        assert path.read_bytes() == b"old" and list(folder.iterdir()) == [path]
        told = r"File too large\. The file that was there before is unchanged\. The file needs \d"
        assert re.search(told, str(raised.value))
    write(path)
    assert path.read_bytes() == new


FULL_DISK = """
import os, sys, torch, limpet
from limpet.errors import SaveError
from torch import nn
def memory(width):
    model = nn.Linear(width, width)
    made = limpet.OnlineLaplace(model)
    made.consolidate([(torch.randn(8, width), torch.randint(0, width, (8,)))], progress=False)
    return made
path = sys.argv[1] + "/m.safetensors"
small, large = memory(10), memory(300)
small.save(path)
before = open(path, "rb").read()
try:
    large.save(path)
except SaveError as error:
    print(error)
assert open(path, "rb").read() == before and os.listdir(sys.argv[1]) == ["m.safetensors"]
limpet.load(path, small.model)
small.save(path)
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=200k tmpfs $0"
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*private, mount, str(tmp_path)], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    command = [*private, f'{mount} && "$1" -c "$2" $0', str(tmp_path), sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r".*/m\.safetensors could not be written: No space left on device\. The file that was there before is "
        r"unchanged\. The file needs 1\.4 MB, and \d+\.\d kB are free: free some space, or save to another folder\n",
        done.stdout,
    )


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000])
def test_the_umask_is_respected_and_a_mode_is_kept(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    with umask(mask):
        atomic.write_text(path, "a")
        assert mode(path) == 0o666 & ~mask
        path.chmod(0o640)
        atomic.write_text(path, "b")
    assert mode(path) == 0o640 and path.read_text() == "b"


def test_symbolic_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target, link = tmp_path / "other" / "m.txt", tmp_path / "link.txt"
    link.symlink_to(Path("other") / "m.txt")
    for text in ("a", "b"):  # the first write is through a link that leads nowhere
        atomic.write_text(link, text)
        assert link.is_symlink() and not target.is_symlink() and target.read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.txt", "m.txt", "other"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(SaveError, match="leads back to itself"):
        atomic.write_text(loop, "a")
    assert loop.is_symlink()


def test_what_is_not_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name, what in (("folder", "a folder"), ("fifo", "not a regular file")):
        with pytest.raises(SaveError, match=rf"{name} is {what}, which cannot be replaced"):
            atomic.write_text(tmp_path / name, "a")
    with pytest.raises(FileNotFoundError, match="create it first"):
        atomic.write_text(tmp_path / "none" / "a", "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "folder"]


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(SaveError, match=r"Permission denied\. No file was written\. Save to a folder"):
        atomic.write_text(tmp_path / "a", "a")


def test_what_killed_writers_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    others = [".m.txt.tmp", ".m.txt.0123456789abcdef", "m.txt.0123456789abcdef.tmp", ".n.txt.0123456789abcdef.tmp"]
    others += [".m.txt.0123456789ABCDEF.tmp", ".m.txt2.0123456789abcdef.tmp", ".m.txt.0123456789abcde.tmp"]
    for name in (STALE, ".m.txt.3.rank0of2.0123456789abcdef.tmp", *others):
        (tmp_path / name).write_text("")
    (tmp_path / ".m.txt.aaaaaaaaaaaaaaaa.tmp").mkdir()
    (tmp_path / ".m.txt.bbbbbbbbbbbbbbbb.tmp").symlink_to(tmp_path / others[0])
    atomic.write_text(tmp_path / "m.txt", "a")
    kept = {"m.txt", *others, ".m.txt.aaaaaaaaaaaaaaaa.tmp", ".m.txt.bbbbbbbbbbbbbbbb.tmp"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_what_a_living_process_writes_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    with atomic.atomic_write(path) as first:
        atomic.write_text(path, "second")
        assert first.exists()
        first.write_text("first")
        assert first.exists() and path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    path = tmp_path / "m.txt"
    for lacking in (unsupported, None):
        if lacking is None:
            monkeypatch.setattr("limpet.io.flock.fcntl", None)
        else:
            monkeypatch.setattr(fcntl, "flock", lacking)
        (tmp_path / STALE).write_text("")
        atomic.write_text(path, "a")
        assert (tmp_path / STALE).exists() and path.read_text() == "a"
        os.utime(tmp_path / STALE, (0, 0))
        atomic.write_text(path, "b")
        assert list(tmp_path.iterdir()) == [path] and path.read_text() == "b"


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not seen:
            seen.extend(tmp_path.iterdir())
            seen[0].unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    atomic.write_text(tmp_path / "m.txt", "a")
    assert seen and list(tmp_path.iterdir()) == [tmp_path / "m.txt"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    path, errors = tmp_path / "m.txt", []

    def write(number: int) -> None:
        try:
            for _ in range(30):
                atomic.write_text(path, str(number) * 5000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and list(tmp_path.iterdir()) == [path]
    text = path.read_text()
    assert len(text) == 5000 and len(set(text)) == 1


def test_long_names(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{SNOWMAN}" * 85):
        atomic.write_text(tmp_path / name, "a")
        (tmp_path / f".{name[:50]}.0123456789abcdef.tmp").write_text("")
        atomic.write_text(tmp_path / name, "b")
        assert list(tmp_path.iterdir()) == [tmp_path / name]
        (tmp_path / name).unlink()


def test_files_and_folders_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        found = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(found.st_mode) else f"file of {found.st_size}")
        sync(descriptor)

    def replaced(self: Path, target: Any) -> Any:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    atomic.write_text(tmp_path / "m.txt", "abc")
    assert done == ["file of 3", "rename", "folder"]


def test_removing_a_file_removes_what_killed_writers_left(tmp_path: Path) -> None:
    for name in ("m.txt", STALE, "n.txt"):
        (tmp_path / name).write_text("")
    atomic.remove(tmp_path / "m.txt")
    assert list(tmp_path.iterdir()) == [tmp_path / "n.txt"]
    atomic.remove(tmp_path / "m.txt")
