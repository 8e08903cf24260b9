"""Describes a device of this machine to plan for; measures its speed."""

import math

import torch

from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.four_bits import has_bitsandbytes
from sebp_edge.machine import devices
from sebp_edge.ops.backend import has_triton


def target_of(device: torch.device, context: int) -> Target:
    """Describes a device of this machine.

    Args:
        context: bytes of the process outside torch's allocator.
    """
    dtype, on_gpu = devices.pick_dtype(device), device.type == "cuda"
    return Target(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        has_kernels=on_gpu and has_triton(),
        has_bitsandbytes=has_bitsandbytes(),
        rate=devices.matmul_rate(device, dtype),
        context=context,
        host=devices.free_memory(torch.device("cpu")) if on_gpu else math.inf,
    )
