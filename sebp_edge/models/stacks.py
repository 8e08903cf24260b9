"""Room for the stacks of a GPU's threads, which the driver holds for every thread that can run at once.

    bytes = limit of one thread x multiprocessors x threads of one          H100: 1024 x 132 x 2048 = 0.28 GB

The limit is for kernels whose need no compiler knows. Those of torch, cuBLAS and Triton have a known one, and the
driver gives each kernel at least that. So within a memory budget the limit is a quarter of what it usually is.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

USUAL, ENOUGH = 1024, 256
# CU_LIMIT_STACK_SIZE of the driver's interface.
_STACK_SIZE = 0


def held(device: torch.device, limit: int | None = None) -> int:
    """Bytes that the driver holds at `limit` bytes for a thread; by default at the limit that there is."""
    gpu = torch.cuda.get_device_properties(device)
    return (
        (_limit(device) if limit is None else limit) * gpu.multi_processor_count * gpu.max_threads_per_multi_processor
    )


def least_held(device: torch.device) -> int:
    """The same when stacks are cut."""
    return held(device, min(_limit(device), USUAL if _driver() is None else ENOUGH))


@contextmanager
def cut(device: torch.device) -> Iterator[None]:
    """Within it, a GPU's threads have small stacks; for another device it does nothing."""
    before = _limit(device) if device.type == "cuda" and _driver() is not None else 0
    if before <= ENOUGH:
        yield
        return
    _set_limit(device, ENOUGH)
    try:
        yield
    finally:
        _set_limit(device, before)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library; None where it goes by another name."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _limit(device: torch.device) -> int:
    """Bytes that each thread may use; the usual number where the driver does not tell."""
    limit = ctypes.c_size_t()
    with torch.cuda.device(device):
        failed = _driver() is None or _driver().cuCtxGetLimit(ctypes.byref(limit), _STACK_SIZE)
    return USUAL if failed else limit.value


def _set_limit(device: torch.device, size: int) -> None:
    """Waits for the device. A driver that refuses leaves the limit as it is."""
    with torch.cuda.device(device):
        _driver().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size))
