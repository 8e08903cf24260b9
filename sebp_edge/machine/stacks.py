"""Measures and lowers the memory that a GPU's driver reserves for the stacks of all threads that can run at once.

    bytes = bytes per thread x multiprocessors x threads per multiprocessor     H100: 1024 x 132 x 2048 = 0.28 GB

The limit per thread only matters to kernels whose stack size the compiler does not know; others get what they need. So
with a memory budget it is lowered to a quarter of the default. Trainings on an H100 ran with that.

AMD GPUs were not measured: for them nothing is counted and nothing is lowered.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sebp_edge.machine.host import LOWERED, USUAL

# CU_LIMIT_STACK_SIZE of the driver API.
_STACK_SIZE = 0


def reserved(device: torch.device) -> int:
    """Returns the bytes that the driver reserves for stacks now."""
    return _bytes(device, _limit(device) or USUAL)


def min_reserved(device: torch.device) -> int:
    """Returns the bytes that the driver reserves within `lowered`."""
    limit = _limit(device)
    return _bytes(device, USUAL if limit is None else min(limit, LOWERED))


@contextmanager
def lowered(device: torch.device) -> Iterator[None]:
    """Lowers the stack limit of a GPU, and restores it on exit; does nothing if the driver has no such limit."""
    before = _limit(device) if device.type == "cuda" else None
    if before is None or before <= LOWERED:
        yield
        return
    _set_limit(device, LOWERED)
    try:
        yield
    finally:
        # After an error that ends CUDA for this process, there is nothing to restore.
        with suppress(RuntimeError):
            _set_limit(device, before)


@functools.cache
def driver() -> ctypes.CDLL | None:
    """Returns NVIDIA's driver library; None for other GPUs, or if it is not found under its usual name."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _bytes(device: torch.device, limit: int) -> int:
    if torch.version.hip is not None:
        return 0
    gpu = torch.cuda.get_device_properties(device)
    return limit * gpu.multi_processor_count * gpu.max_threads_per_multi_processor


def _limit(device: torch.device) -> int | None:
    """Returns the bytes of stack per thread; None if the driver does not report it."""
    if driver() is None:
        return None
    limit = ctypes.c_size_t()
    with torch.cuda.device(device):
        # The limit belongs to the current context, which a thread's first call through torch sets.
        torch.cuda.mem_get_info(device)
        failed = driver().cuCtxGetLimit(ctypes.byref(limit), _STACK_SIZE)
    return None if failed else limit.value


def _set_limit(device: torch.device, size: int) -> None:
    """Sets the bytes of stack per thread, which waits for the device; without effect if the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)
        driver().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size))
