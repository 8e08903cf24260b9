"""Limits the process's host memory, so that running out raises an error: Linux would kill the process silently."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def limited_host_memory(size: int) -> Iterator[None]:
    """Lets this process take at most `size` more bytes of host memory within it; has no effect outside Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before, highest = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = psutil.Process().memory_info().data + size
    limits = [wanted, *(limit for limit in (before, highest) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, highest))
