"""Finds the device to run on, its dtype, memory and speed; recognises out-of-memory errors and releases memory."""

import ctypes
import functools
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from sebp_edge.basics.files import keep, read_kept
from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.errors import MachineError, OptionError
from sebp_edge.machine.host import WIDE, free_host_memory, total_host_memory

# How many times as fast as fp32 a CPU must multiply bf16, since attention stays in fp32 and the rest gains nothing.
# With AVX512-BF16 it was measured 4 to 5 times, with AMX 3 to 5.
MIN_GAIN_OF_BF16 = 2.0
# From this size on, a tensor has a segment of torch's allocator of its own on a GPU.
SEGMENT_OF_ONE = 10 * 2**20


def pick_device(wanted: str | None = None) -> torch.device:
    """Returns the requested device; by default a CUDA GPU, else Apple's GPU, else the CPU."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # The best kind first.
    counts = {"cuda": cuda, "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    counts = {name: count for name, count in counts.items() if count}
    if wanted is None:
        return torch.device(next(iter(counts)))
    found = re.fullmatch(r"(cuda|mps|cpu)(?::([0-9]{1,4}))?", wanted) if isinstance(wanted, str) else None
    if found is None:
        raise OptionError(f"Unknown device {wanted!r}; choose from {', '.join(counts)}.")
    if int(found[2] or 0) >= counts.get(found[1], 0):
        raise MachineError(f"Device {wanted!r} is not usable on this machine; choose from {', '.join(counts)}.")
    return torch.device(wanted)


def driver_problem() -> str | None:
    """Returns a sentence for the user if torch is built for CUDA but finds no usable driver, else None."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    return (
        f"This torch is built for CUDA {torch.version.cuda} but finds no usable NVIDIA driver or GPU, "
        "so the CPU is used; if this machine has an NVIDIA GPU, update its driver."
    )


def unused_gpus(device: torch.device) -> str | None:
    """Returns a sentence for the user if a training on `device` leaves GPUs unused, else None."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count == 1:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return (
        f"One of {count} GPUs is used, cuda:{index}; choose another by device='cuda:{(index + 1) % count}', or train "
        "on all of them with sparsify in a loop of your own."
    )


def refuse_several_processes() -> None:
    """Raises a MachineError if this process was started as one of several, as by torchrun or accelerate."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count.isdecimal() and int(count) > 1:
        raise MachineError(
            f"This is one of {count} processes (WORLD_SIZE={count}), and all of them would train and save the same "
            "adapter; start a single one, without torchrun or accelerate, or train with sparsify in a loop of your own."
        )


def pick_dtype(device: torch.device, width: int = 0) -> torch.dtype:
    """Returns the dtype of the base weights: bf16 if the GPU supports it or the CPU multiplies it fast, else fp32.

    Never fp16, in which the activations of some models overflow. Trained bf16 weights are rounded stochastically (see
    `adamw_`), since with rounding to nearest they would not change at small learning rates.

    Args:
        width: the model's hidden size. On a CPU, narrow models are no faster in bf16.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    if device.type == "cpu" and width >= WIDE and multiplies_bf16():
        return torch.bfloat16
    return torch.float32


@functools.cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 much faster than fp32.

    Measured once on a machine and kept, so that no busy moment changes the bits of later trainings.
    """
    machine = {
        "torch": torch.__version__,
        "host": platform.node(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    # Else oneDNN keeps half a megabyte for each size of matrices in bf16, up to a thousand of them.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    found, cpu = read_kept("bf16", machine), torch.device("cpu")
    if not isinstance(found, bool):
        found = matmul_rate(cpu, torch.bfloat16) >= MIN_GAIN_OF_BF16 * matmul_rate(cpu, torch.float32)
        keep("bf16", machine, found)
    return found


def lacks_bf16(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU older than Ampere, where weights take twice the memory."""
    return device.type == "cuda" and pick_dtype(device) != torch.bfloat16


def free_memory(device: torch.device) -> int:
    """Returns the bytes of free memory on `device`; for host memory, within the limits of containers."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory on `device`; for host memory, within the limits of containers."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return total_host_memory()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a matrix product, the best of two to six in a tenth of a second, measured once per process.

    The product is [512, 1024] by [1024, 1024] on the CPU and [4096, 4096] by [4096, 4096] on a GPU, where launching the
    small one takes longer than computing it.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _measured_matmul_rate(device, dtype)


@functools.cache
def _measured_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, columns = (4096, 4096) if device.type == "cuda" else (512, 1024)
    times = []
    with _measuring(f"on this {device.type.upper()} to measure its speed"):
        x, weight = (torch.ones(size, device=device, dtype=dtype) for size in ((rows, columns), (columns, columns)))
        while len(times) < 2 or (len(times) < 6 and sum(times) < 0.1):
            times.append(seconds_of(lambda: x @ weight, device))
    return 2 * rows * columns * columns / min(times)


@functools.cache
def bus_rate(device: torch.device) -> float:
    """Returns the bytes per second of copies from locked host memory to a GPU, the best of three, measured once."""
    with _measuring("to measure the speed of the bus"):
        host = torch.empty(2**25, dtype=torch.uint8, pin_memory=True)
        copy = torch.empty_like(host, device=device)
        return len(host) / min(seconds_of(lambda: copy.copy_(host, non_blocking=True), device) for _ in range(3))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call, until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def _measuring(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise MachineError(f"Too little memory is free {what}; close other programs.") from error


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Context that restores the random states of the CPU and of `device` on exit."""
    # Without devices, torch would warn of every other GPU.
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Context in which torch computes with so many threads on the CPU; None changes nothing."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context in which torch's attention does not use cuDNN, which plans each new size for up to half a second.

    On an H100, torch prefers it from version 2.11 on. Within another such context, this one changes nothing.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextmanager
def without_autocast_cache(device: torch.device) -> Iterator[None]:
    """Disables autocast's cache of cast weights, which may be outdated or lack gradients; leaves autocast enabled."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, dtype, enabled, cache_enabled=False):
        yield


def clear_frames(error: BaseException | None, handled: BaseException | None = None) -> None:
    """Clears the local variables in the frames of an error and of its causes.

    Otherwise a reference to the error keeps alive all that had been computed. Running frames are skipped.

    Args:
        handled: an error that was being handled before the work began; it and its causes are skipped.
    """
    known, waiting = {id(None), id(handled)}, [error]
    while waiting:
        error = waiting.pop()
        if id(error) not in known:
            known.add(id(error))
            traceback.clear_frames(error.__traceback__)
            waiting += [error.__cause__, error.__context__]


def moved_into_gaps(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor that shares a segment of torch's allocator with others; itself if it has its own.

    The copy takes memory that others have freed, so that whole segments become free.
    """
    shares = tensor.device.type == "cuda" and tensor.untyped_storage().nbytes() < SEGMENT_OF_ONE
    return tensor.clone() if shares else tensor


def release_memory(device: torch.device) -> None:
    """Waits for the device, and releases memory that torch or the heap caches."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # This releases the pinned host memory of copies to the GPU.
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc only


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
