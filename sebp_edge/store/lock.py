"""A lock between processes and threads: the operating system frees it when its holder ends, however it ends."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from sebp_edge.errors import StorageError

_FILE = ".lock"


@contextmanager
def locked(store: Path, seconds: float = 60) -> Iterator[None]:
    """Context in which no other process or thread changes the store; waits up to so many seconds for it."""
    # Not filelock's FileLock, which makes missing folders, readable by others.
    descriptor = os.open(store / _FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while not lock_descriptor(descriptor, blocking=False):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"Another process has been changing the adapters in {str(store)!r} for {seconds} "
                    "seconds; wait for it or end it, then try again."
                )
            time.sleep(random.uniform(0.001, 0.01))
        yield
    finally:
        # Closing frees the lock.
        os.close(descriptor)


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Context that locks an existing file, without waiting; yields whether it could be locked.

    Raises:
        FileNotFoundError: there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield lock_descriptor(descriptor, blocking=False)
    finally:
        os.close(descriptor)
