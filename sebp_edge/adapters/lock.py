"""A lock between processes and threads: the operating system frees it when its holder ends, however it ends."""

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sebp_edge.errors import StorageError

if os.name == "nt":
    import msvcrt
else:
    import fcntl

_WAIT_SECONDS = 60
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context in which no other process or thread is in a context of the same lock file, which is made if needed.

    Raises:
        StorageError: another one has held the lock for a minute.
        OSError: the file cannot be opened, or its disk has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"Another process has been changing the adapters in {str(path.parent)!r} for {_WAIT_SECONDS} "
                    "seconds; wait for it or end it, then try again."
                )
            time.sleep(random.uniform(0.001, 0.01))
        yield
    finally:
        # Closing frees the lock.
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Locks an open file until it is closed; returns False if another process or thread has locked it.

    Raises:
        OSError: its disk has no locks.
    """
    try:
        if os.name == "nt":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True
