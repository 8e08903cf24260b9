"""Describes the device that a training is planned for: one of this machine, or an absent GPU. Imports no torch."""

import math
from dataclasses import dataclass

from sebp_edge.machine.host import CONTEXT, LOWERED

# Threads of an H100, each with a reserved stack (see `sebp_edge.machine.stacks`); smaller GPUs have fewer.
_THREADS = 132 * 2048
# Assumed FLOP/s of a device that was not measured; they only order the choices, and no time is reported.
ASSUMED_RATE = 60e12
# Bytes per second to a GPU, over PCI Express 4.0 x16; an H100's 5.0 reaches 55e9.
ASSUMED_BUS = 24e9
_SIZES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Target:
    """The device that a training is planned for."""

    device: str  # "cuda", "mps" or "cpu"
    dtype: str  # of the base model's weights and of activations: "bfloat16" or "float32"
    has_kernels: bool  # whether norms, gates and the loss run on our kernels
    has_bitsandbytes: bool
    rate: float | None  # floating-point operations per second; None if unknown
    context: int  # bytes of the process outside torch's allocator
    bus: float = ASSUMED_BUS  # bytes per second from the host to a GPU
    host: float = math.inf  # free bytes of host memory for a training on a GPU; infinite if unlimited
    gpu: int | None = None  # bytes of memory of an absent GPU; None for this machine

    @classmethod
    def absent_gpu(cls, gpu: int) -> "Target":
        """Describes an NVIDIA GPU with `gpu` bytes, Ampere or newer; nothing else is known about its machine."""
        return cls(
            device="cuda",
            dtype="bfloat16",
            has_kernels=True,
            has_bitsandbytes=True,
            rate=None,
            context=CONTEXT + LOWERED * _THREADS,
            gpu=gpu,
        )

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of `dtype`."""
        return _SIZES[self.dtype]
