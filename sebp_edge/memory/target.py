"""Describes the device that a training is planned for: one of this machine, or an absent GPU."""

import math
from dataclasses import dataclass

import torch

from sebp_edge.machine import devices, process, stacks
from sebp_edge.models.loading import has_bitsandbytes
from sebp_edge.ops.backend import has_triton

# Threads of an H100, each with a reserved stack (see `sebp_edge.machine.stacks`); smaller GPUs have fewer.
_THREADS = 132 * 2048
# Assumed FLOP/s of a GPU that cannot be measured; they only order the choices, and no time is reported.
_RATE = 60e12


@dataclass(frozen=True)
class Target:
    """The device that a training is planned for.

    Attributes:
        device: the device; without an index if it is absent.
        dtype: the dtype of the base model's weights and of activations.
        has_kernels: whether norms, gates and the loss run on our kernels.
        has_bitsandbytes: whether a base model can be loaded in 4 bits.
        rate: floating-point operations per second.
        context: bytes of the process outside torch's allocator.
        host: free bytes of host memory for a training on a GPU; infinite if unlimited.
        gpu: bytes of memory of an absent GPU; None for this machine.
    """

    device: torch.device
    dtype: torch.dtype
    has_kernels: bool
    has_bitsandbytes: bool
    rate: float
    context: int
    host: float
    gpu: int | None = None

    @classmethod
    def this_machine(cls, device: torch.device, context: int) -> "Target":
        """Describes a device of this machine; measures its speed."""
        dtype, on_gpu = devices.pick_dtype(device), device.type == "cuda"
        return cls(
            device=device,
            dtype=dtype,
            has_kernels=on_gpu and has_triton(),
            has_bitsandbytes=has_bitsandbytes(),
            rate=devices.matmul_rate(device, dtype),
            context=context,
            host=devices.free_memory(torch.device("cpu")) if on_gpu else math.inf,
        )

    @classmethod
    def absent_gpu(cls, gpu: int) -> "Target":
        """Describes an NVIDIA GPU with `gpu` bytes, Ampere or newer; nothing else is known about its machine."""
        return cls(
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            has_kernels=True,
            has_bitsandbytes=True,
            rate=_RATE,
            context=process.CONTEXT + stacks.LOWERED * _THREADS,
            host=math.inf,
            gpu=gpu,
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
