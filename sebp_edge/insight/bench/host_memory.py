"""The host's memory runs out with an error that can be handled: Linux would end the process, without a word."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def limited_to(size: int) -> Iterator[None]:
    """Within it this process can take `size` bytes more of the host's memory, on Linux; elsewhere there is no limit."""
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
