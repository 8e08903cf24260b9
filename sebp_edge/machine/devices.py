"""The device to run on: its number format, its memory and speed, and what to do when memory has run out."""

import ctypes
import functools
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from sebp_edge.errors import MachineError, OptionError
from sebp_edge.machine import container


def pick_device(wanted: str | None = None) -> torch.device:
    """The device to run on: the one asked for, else a CUDA GPU, else Apple's, else the CPU.

    Raises:
        OptionError: the name is not a device's.
        MachineError: the device asked for is not usable here.
    """
    counts = {name: count for name, count in _devices().items() if count}
    if wanted is None:
        return torch.device(next(iter(counts)))
    found = re.fullmatch(r"(cuda|mps|cpu)(?::([0-9]{1,4}))?", wanted) if isinstance(wanted, str) else None
    if found is None:
        raise OptionError(f"Unknown device {wanted!r}; usable on this machine are {', '.join(counts)}.")
    if int(found[2] or 0) >= counts.get(found[1], 0):
        raise MachineError(f"Device {wanted!r} is not usable on this machine; usable are {', '.join(counts)}.")
    return torch.device(wanted)


def _devices() -> dict[str, int]:
    """The number of devices of each kind, the best kind first."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"cuda": cuda, "mps": int(torch.backends.mps.is_available()), "cpu": 1}


def driver_problem() -> str | None:
    """A sentence for the user if torch is built for CUDA and finds no usable driver, else None."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    return (
        f"This torch is built for CUDA {torch.version.cuda} but finds no usable NVIDIA driver or GPU, "
        "so the CPU is used; if there is a GPU, update its driver."
    )


def pick_dtype(device: torch.device) -> torch.dtype:
    """The number format of the base weights: bf16 if the GPU supports it, else fp32.

    Never fp16, in which activations of some models overflow. Trained bf16 weights are rounded stochastically (see
    `adamw_`); rounded to the nearest, they would not move at small learning rates.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def lacks_bf16(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU older than Ampere, where weights take twice the memory."""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


def free_memory(device: torch.device) -> int:
    """Bytes of memory that are free on `device` now; of the host's, at most what a container leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *(limit.free for limit in container.limits())])


def total_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has; of the host's, at most what a container may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min([psutil.virtual_memory().total, *(limit.total for limit in container.limits())])


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product, the best of several; measured once per process, in a few hundredths of a second.

    The product is [512, 1024] by [1024, 1024] on the CPU and [4096, 4096] by [4096, 4096] on a GPU, where launching the
    small one takes longer than computing it.

    Raises:
        MachineError: too little memory is free even for that.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _measured_matmul_rate(device, dtype)


@functools.cache
def _measured_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, columns = (4096, 4096) if device.type == "cuda" else (512, 1024)
    best = float("inf")
    try:
        x, weight = (torch.ones(size, device=device, dtype=dtype) for size in ((rows, columns), (columns, columns)))
        for _ in range(6):
            synchronize(device)
            begin = time.perf_counter()
            x @ weight
            synchronize(device)
            best = min(best, time.perf_counter() - begin)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise MachineError(
            f"To plan a training, not enough of this {device.type.upper()}'s memory is free for a single product; "
            "close other programs."
        ) from error
    return 2 * rows * columns * columns / best


# What torch says where it has no class for the error: on the CPU, on Apple's GPU, in CUDA's own calls and in cuBLAS.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def without_autocast_cache(device: torch.device) -> Iterator[None]:
    """Disables autocast's cache of cast weights, which may be outdated or without gradients, but not autocast."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, dtype, enabled, cache_enabled=False):
        yield


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    known = set()
    while isinstance(error, RuntimeError | MemoryError) and id(error) not in known:
        known.add(id(error))
        has_own_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if has_own_class or any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def clear_frames(error: BaseException | None, handled: BaseException | None = None) -> None:
    """Clears the local variables in the frames of an error and of those that it was raised from.

    Otherwise whoever holds the error keeps alive all that had been computed. Running frames are left alone.

    Args:
        handled: an error that was being handled before the work began; it and its causes are left alone.
    """
    known, waiting = {id(None), id(handled)}, [error]
    while waiting:
        error = waiting.pop()
        if id(error) not in known:
            known.add(id(error))
            traceback.clear_frames(error.__traceback__)
            waiting += [error.__cause__, error.__context__]


def release_memory(device: torch.device) -> None:
    """Waits for the device, and returns memory that torch or the heap holds unused."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # Also the page-locked host memory of copies to the GPU.
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc's


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
