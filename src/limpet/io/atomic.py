"""Replace files atomically and durably: an error, a kill or a power failure leaves the old file or the new one.

A file is written under a temporary name in the same folder, `.{name}.{16 hexadecimal digits}.tmp`, synced to the disk
(fsync), renamed, and the folder is synced as well.

- The temporary file is created exclusively and locked (flock) while it is written. One whose lock is free was left
  behind by a process that was killed; the next write of the same file deletes it. Where there are no locks, it is
  deleted once it is a day old.
- A new file has the permissions that the umask allows; a file that is replaced keeps its own. Its owner becomes the
  user that writes, and other hard links to it keep the old content.
- A symbolic link is followed, as by `open`: the file it points to is replaced and the link stays. A target that is not
  a regular file, such as a folder or a device, is rejected.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from limpet.errors import SaveError
from limpet.io import flock

STALE_SECONDS = 86_400.0
"""Age from which a temporary file is deleted on file systems without locks."""
STEM = 50
"""Number of characters of the file's name in a temporary name, which must fit into 255 bytes."""
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def atomic_write(path: str | Path, *, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` when the body completes, and is deleted if the body raises.

    Args:
        path: The file to write.
        size: The number of bytes that will be written, for the error message. None if it is unknown.

    Yields:
        The path of an empty file to write to.

    Raises:
        FileNotFoundError: If the folder does not exist.
        SaveError: If the operating system reports an error, such as a full disk.
    """
    with saving(path, size) as target:
        pending = PendingFile.create(target, temporary_name(target))
        try:
            yield pending.path
            pending.commit()
        finally:
            pending.discard()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically.

    Args:
        path: The file to write.
        text: Its content.

    Raises:
        FileNotFoundError: If the folder does not exist.
        SaveError: If the operating system reports an error, such as a full disk.
    """
    with atomic_write(path, size=len(text.encode())) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Delete a file, if it exists, and the temporary files that killed processes left behind."""
    path.unlink(missing_ok=True)
    sweep(path)


def hard_link(source: Path, path: Path) -> bool:
    """Replace `path` by a hard link to `source`, atomically.

    Args:
        source: An existing file.
        path: The file to replace.

    Returns:
        False if the file system has no hard links, or the source is gone; `path` is then unchanged.
    """
    temporary = path.with_name(temporary_name(path))
    try:
        os.link(source, temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # renaming a link onto another link of the same file leaves both
    return True


class PendingFile:
    """A locked temporary file that is to replace another one.

    Args:
        target: The file to replace.
        path: The temporary file.
        descriptor: Its file descriptor, which holds the lock.
    """

    def __init__(self, target: Path, path: Path, descriptor: int) -> None:
        self.target, self.path, self._descriptor = target, path, descriptor

    @classmethod
    def create(cls, target: Path, name: str) -> PendingFile:
        """Create and lock the temporary file, and delete those that killed processes left behind.

        Args:
            target: The file to replace, as returned by `destination`.
            name: The temporary name, as returned by `temporary_name`.

        Returns:
            The file.
        """
        sweep(target)
        path = target.with_name(name)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        while True:
            descriptor = os.open(path, flags, 0o666 if mode is None else 0o600)
            pending = cls(target, path, descriptor)
            try:
                flock.lock(descriptor, wait=True)
                if mode is not None and hasattr(os, "fchmod"):
                    os.fchmod(descriptor, mode)
                if os.fstat(descriptor).st_nlink:
                    return pending
            except BaseException:
                pending.discard()
                raise
            pending.discard()  # another process swept it between its creation and its lock

    def commit(self) -> None:
        """Sync the file to the disk and let it replace the target."""
        _sync(self.path)
        if flock.fcntl is None:  # Windows cannot rename open files
            self._close()
        self.path.replace(self.target)
        try:
            _sync(self.target.parent)
        except OSError as error:
            raise SaveError(
                f"{self.target} was written, but its folder could not be synced to the disk ({error.strerror}), so a "
                "power failure may bring the previous file back: check the disk",
                error.errno,
            ) from error

    def discard(self) -> None:
        """Delete the temporary file if it was not committed, and release its lock."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # everything was synced through other descriptors
                os.close(descriptor)


@contextmanager
def saving(path: str | Path, size: int | None = None) -> Iterator[Path]:
    """Yield the file that is to be replaced, and turn errors of the operating system into a SaveError.

    Args:
        path: The file to write, or a symbolic link to it.
        size: The number of bytes that will be written. None if it is unknown.

    Yields:
        The file without symbolic links.

    Raises:
        FileNotFoundError: If the folder does not exist.
        SaveError: If the body raises an OSError.
    """
    target = destination(path)
    existed = target.exists()
    try:
        yield target
    except SaveError:
        raise
    except OSError as error:
        raise _explained(target, existed, size, error) from error


def destination(path: str | Path) -> Path:
    """Follow symbolic links to the file that is to be written.

    Args:
        path: The file to write, or a symbolic link to it.

    Returns:
        The path of the file, which need not exist.

    Raises:
        FileNotFoundError: If its folder does not exist.
        SaveError: If it is not a regular file, or a symbolic link points to itself.
    """
    path = Path(path)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise SaveError(f"{path} is a symbolic link that leads back to itself: delete it", errno.ELOOP)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to save {target.name} in: create it first")
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "not a regular file"
        raise SaveError(f"{target} is {what}, which cannot be replaced by a file: choose another name", errno.EINVAL)
    return target


def temporary_name(target: Path) -> str:
    """Return a new, unique temporary name for a file."""
    return f".{target.name[:STEM]}.{secrets.token_hex(8)}.tmp"


def sweep(target: Path) -> None:
    """Delete temporary files of a target, or of files whose names extend it, that killed processes left behind.

    Args:
        target: The file whose temporary files are deleted. Those that a living process is writing are kept.
    """
    pattern = re.compile(rf"\.{re.escape(target.name[:STEM])}(\..*)?\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with suppress(OSError):
                    _delete_if_stale(Path(entry.path))


def _delete_if_stale(path: Path) -> None:
    """Delete a temporary file if no living process holds its lock."""
    if flock.fcntl is None:
        stale = time.time() - path.stat().st_mtime > STALE_SECONDS
        if stale:
            path.unlink()
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return
        if flock.lock(descriptor, wait=False) or time.time() - found.st_mtime > STALE_SECONDS:
            path.unlink()
    except BlockingIOError:  # its owner is alive
        return
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, where the platform can."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    try:
        descriptor = os.open(path, (os.O_RDONLY if folder else os.O_RDWR) | getattr(os, "O_CLOEXEC", 0))
    except PermissionError:
        if folder:  # it may be writable and not readable
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _explained(target: Path, existed: bool, size: int | None, error: OSError) -> SaveError:
    """Describe why a file could not be written, what is there now, and what to do."""
    left = "The file that was there before is unchanged" if existed else "No file was written"
    needed = "More space is needed" if size is None else f"The file needs {megabytes(size)}"
    if error.errno in FULL:
        free = megabytes(shutil.disk_usage(target.parent).free)
        advice = f"{needed}, and {free} are free: free some space, or save to another folder"
    elif error.errno == errno.EFBIG:
        advice = f"{needed}: raise the limit on the size of files (ulimit -f)"
    elif error.errno in FORBIDDEN:
        advice = "Save to a folder that you may write to"
    else:
        advice = "Check the disk, or save to another folder"
    reason = error.strerror or str(error)
    return SaveError(f"{target} could not be written: {reason}. {left}. {advice}", error.errno)


def megabytes(count: int) -> str:
    """Format a number of bytes.

    Examples:
        >>> megabytes(1_500), megabytes(2_340_000), megabytes(12_000_000_000)
        ('1.5 kB', '2.3 MB', '12.0 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
