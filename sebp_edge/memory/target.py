"""Describes the device that a training is planned for: one of this machine, or a GPU that is not here."""

import math
from dataclasses import dataclass

import torch

from sebp_edge.machine import devices, process, stacks
from sebp_edge.models.loading import has_bitsandbytes
from sebp_edge.ops.backend import has_triton

# Threads of an H100, each with a stack in reserved memory (see `sebp_edge.machine.stacks`); smaller GPUs have fewer.
_THREADS = 132 * 2048
# Assumed FLOP/s of a GPU that cannot be measured: only orders the plans; no time is reported.
_RATE = 60e12


@dataclass(frozen=True)
class Target:
    """The device that a training is planned for.

    Attributes:
        device: its type, and its index if it is one of this machine.
        dtype: of the base model's weights and of activations.
        has_kernels: whether norms, gates and the loss run on our kernels.
        has_bitsandbytes: whether a base model can be loaded in 4 bits.
        rate: floating-point operations per second.
        context: bytes that the process holds outside torch's allocator.
        host: free bytes of the host's memory beside a GPU; infinite if they set no limit.
        gpu: memory in bytes of a GPU that is not here; None for this machine.
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
        """Describes an NVIDIA GPU, Ampere or newer, with `gpu` bytes; nothing else is known of its machine."""
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
