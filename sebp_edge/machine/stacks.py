"""Room for the stacks of a GPU's threads, which the driver holds for every thread that can run at once.

    bytes = limit of one thread x multiprocessors x threads of one          H100: 1024 x 132 x 2048 = 0.28 GB

The limit is for kernels whose need no compiler knows; to each other one the driver gives what it needs, whatever the
limit is. So within a memory budget it is a quarter of what it usually is, which trainings on an H100 ran with.

What AMD's GPUs hold for stacks was not measured: nothing is counted for them, and nothing is cut.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

USUAL, ENOUGH = 1024, 256
# CU_LIMIT_STACK_SIZE of the driver's interface.
_STACK_SIZE = 0


def held(device: torch.device) -> int:
    """Bytes that the driver holds."""
    return _bytes(device, _limit(device) or USUAL)


def least_held(device: torch.device) -> int:
    """The same when stacks are cut."""
    limit = _limit(device)
    return _bytes(device, USUAL if limit is None else min(limit, ENOUGH))


@contextmanager
def cut(device: torch.device) -> Iterator[None]:
    """Within it, a GPU's threads have small stacks; where no driver takes the limit, what they have."""
    before = _limit(device) if device.type == "cuda" else None
    if before is None or before <= ENOUGH:
        yield
        return
    _set_limit(device, ENOUGH)
    try:
        yield
    finally:
        # After an error that CUDA does not come back from, nothing is there to be put back.
        with suppress(RuntimeError):
            _set_limit(device, before)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """NVIDIA's driver; None for other GPUs, and where its library goes by another name."""
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
    """Bytes that each thread may use; None where the driver does not tell."""
    if _driver() is None:
        return None
    limit = ctypes.c_size_t()
    with torch.cuda.device(device):
        # The driver speaks of the thread's own context, which torch's first call of a thread makes current.
        torch.cuda.mem_get_info(device)
        failed = _driver().cuCtxGetLimit(ctypes.byref(limit), _STACK_SIZE)
    return None if failed else limit.value


def _set_limit(device: torch.device, size: int) -> None:
    """Waits for the device. A driver that refuses leaves the limit as it is."""
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)
        _driver().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size))
