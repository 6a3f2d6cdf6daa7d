"""Exclusive locks on open files (flock), which the kernel releases when their process ends, however it ends."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Any

fcntl: Any = None
with suppress(ImportError):  # Windows has none
    import fcntl

UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors on a file system that has no locks."""


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file exclusively.

    Args:
        descriptor: The file descriptor.
        wait: Wait until the lock is free.

    Returns:
        False if the platform or the file system has no locks.

    Raises:
        BlockingIOError: If another process holds the lock, and `wait` is False.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True
