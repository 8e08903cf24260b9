"""Describes a device of this machine to plan for; measures its speed, and keeps both for processes without torch."""

import math

import torch

from sebp_edge.engine.memory.known_machine import known_name, remember_machine
from sebp_edge.engine.memory.target import ASSUMED_BUS, Target
from sebp_edge.engine.models.four_bits import has_bitsandbytes
from sebp_edge.machine import devices
from sebp_edge.machine.host import WIDE
from sebp_edge.machine.process import memory_of
from sebp_edge.ops import backend


def target_of(device: torch.device, context: int, width: int = 0) -> Target:
    """Describes a device of this machine."""
    dtype, on_gpu = devices.pick_dtype(device, width), device.type == "cuda"
    return Target(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        has_kernels=on_gpu and backend.has_kernels(device),
        has_bitsandbytes=has_bitsandbytes(),
        rate=devices.matmul_rate(device, dtype),
        context=context,
        bus=devices.bus_rate(device) if on_gpu else ASSUMED_BUS,
        host=devices.free_memory(torch.device("cpu")) if on_gpu else math.inf,
    )


def present_target(device: torch.device, loaded: int, width: int = 0) -> Target:
    """Describes a device of this machine with what is in its memory now, besides `loaded` bytes of a model."""
    # The first trial of kernels leaves libraries' own memory behind.
    backend.failed_kernels(device)
    return target_of(device, memory_of(device).planned_overhead(loaded), width)


def kernels_problem(device: torch.device) -> str | None:
    """Returns a sentence for the user if our kernels fail on a GPU, so that none of them is used, else None."""
    failed = backend.failed_kernels(device)
    if not failed:
        return None
    return (
        f"Kernels fail their check on this GPU ({failed}), so plain PyTorch computes, in more time and memory; update "
        "the GPU's driver, or torch."
    )


def keep_device(device: torch.device) -> None:
    """Keeps what processes without torch ask of a device, if that can be written; call it while no model is loaded."""
    memory = memory_of(device)
    names = [str(device), *(["default"] if device == devices.pick_device() else [])]
    targets = {known_name(name, width): present_target(device, 0, width) for name in names for width in (0, WIDE)}
    remember_machine(targets, memory.uuid)
