"""Host memory that stays where it is, so that a GPU copies it, and reads it over the bus, by itself.

NVIDIA's driver allocates it, since torch locks powers of two: up to twice as much.
"""

import ctypes
import weakref

import torch
from torch import Tensor

from sebp_edge.basics.units import gigabytes
from sebp_edge.errors import MachineError
from sebp_edge.machine import stacks

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE of the driver API: for all GPUs


def lock(size: int, device: torch.device) -> Tensor:
    """Allocates bytes, [size] in uint8, that a device copies by itself; a CPU copies any memory.

    Raises a MachineError if the host does not lock that much.
    """
    driver = stacks.driver() if device.type == "cuda" else None
    if driver is None or not size:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    address = ctypes.c_void_p()
    torch.cuda.synchronize(device)  # a thread's first call through torch sets its context
    if fault := driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE):
        raise MachineError(
            f"The host refuses to lock {gigabytes(size)} of memory for weights (error {fault} of CUDA's driver); close "
            "other programs, choose a smaller model or, if blocks are streamed, raise the memory budget."
        )
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    weakref.finalize(memory, _free, driver, address, device).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _free(driver: ctypes.CDLL, address: ctypes.c_void_p, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # which may still read it
    driver.cuMemFreeHost(address)


class _Mapped:
    """Locked memory under the address by which GPUs read it, as torch takes memory of other libraries."""

    def __init__(self, host: Tensor):
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def readable_by_gpu(host: Tensor, device: torch.device) -> Tensor:
    """Returns locked memory as a tensor on a GPU, which reads it over the bus each time.

    Args:
        device: with its number; without one, torch may choose another GPU.
    """
    return torch.as_tensor(_Mapped(host), device=device).view(host.dtype).view(host.shape)
