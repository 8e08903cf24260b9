"""Measures the memory that this process uses of a device, and caps what torch may allocate on a GPU.

On a GPU the process uses what torch's allocator reserved, and memory outside of it: CUDA's context, libraries, kernels
and captured graphs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sebp_edge.machine import devices, stacks
from sebp_edge.machine.host import CONTEXT, gpu_use_at_first, nvidia_smi, parse_use, peak_resident, resident

# Up to this change in a GPU's usage, the driver is not queried again, since its answer takes longer than a step.
_MAX_CHANGE = 32 * 2**20
# Bytes in use on a GPU, by its UUID, before CUDA started in this process; None if unknown.
_used_before_start: dict[str, int | None] = {}
# Minimum size of a CUDA context: a call that adds more has created the context.
_MIN_CONTEXT = 100 * 2**20


def memory_of(device: torch.device) -> "GpuMemory | HostMemory":
    """Measures the memory that this process uses of `device`."""
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


class HostMemory:
    """The host memory that this process uses: its resident set.

    Attributes:
        peak: the largest measurement so far, in bytes.
        allocator_peak: None, since torch does not count host memory.
        cached: 0, since the heap's cache is unknown.
        outside, outside_expected: 0, since there is no capped allocator.
        is_capped: False, since host memory can be measured, but not capped.
        uuid: "", since it is no GPU's.
    """

    allocator_peak, cached, outside, outside_expected, is_capped, uuid = None, 0, 0, 0, False, ""

    def __init__(self):
        self.peak = 0
        self.begin()

    def begin(self) -> None:
        """Starts a new measurement."""
        self._peak_before, self._peak_since_begin = peak_resident(), 0

    @property
    def used(self) -> int:
        """Bytes used now."""
        return resident()

    def planned_overhead(self, loaded: int) -> int:
        """Returns the bytes that a plan must add to a training's own; it counts `loaded` bytes in memory already."""
        return max(0, resident() - loaded)

    def measure(self) -> int:
        """Returns the peak in bytes since `begin`: exact if it is the process's peak, else the largest sample."""
        highest = peak_resident()
        self._peak_since_begin = max(self._peak_since_begin, resident(), highest if highest > self._peak_before else 0)
        self.peak = max(self.peak, self._peak_since_begin)
        return self._peak_since_begin

    def transient(self) -> int:
        """Returns the bytes that were used at the peak since `begin` and are free now."""
        return self.measure() - resident()


class GpuMemory:
    """The memory of a GPU that this process uses.

    On most Linux machines the driver reports the usage of each process, and so the memory outside torch's allocator.
    Elsewhere (in containers, on Windows) it reports only the sum over all processes. Then the part outside is
    estimated, rather too high: the increase when CUDA started in this process, or if that was missed, the amount
    measured on an H100; plus any later increase, which may be another program's, up to the same amount again.

    Attributes:
        outside: bytes outside torch's allocator, as last measured.
        allocator_peak: peak bytes of tensors.
        is_capped: True, since beyond its cap torch's allocator raises an out-of-memory error.
    """

    is_capped = True

    def __init__(self, device: torch.device):
        self._device = device
        self.peak = self.allocator_peak = 0
        increase = self._increase_at_start()
        self._last_outside = self._used_outside_torch()
        reported = self._reported()
        # A driver that does not report this process now, when it has a context, never will.
        self._is_reported = reported is not None
        self.outside = reported if reported is not None else increase if increase is not None else self._estimate()

    def begin(self) -> None:
        """Starts a new measurement."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def used(self) -> int:
        """Bytes used now."""
        return self.outside + torch.cuda.memory_reserved(self._device)

    @property
    def cached(self) -> int:
        """Bytes that torch's allocator has reserved but no tensor uses."""
        return torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def planned_overhead(self, loaded: int) -> int:
        """See `HostMemory`."""
        return self.outside_planned + max(0, torch.cuda.memory_allocated(self._device) - loaded)

    @property
    def outside_planned(self) -> int:
        """Estimated bytes outside torch's allocator once all is loaded, with small stacks."""
        return self._outside_with(stacks.min_reserved(self._device))

    @property
    def outside_expected(self) -> int:
        """Estimated bytes outside torch's allocator once all is loaded, with the current stacks."""
        return self._outside_with(stacks.reserved(self._device))

    def _outside_with(self, stack_bytes: int) -> int:
        return max(CONTEXT + stack_bytes, self.outside - (stacks.reserved(self._device) - stack_bytes))

    def measure(self) -> int:
        """Returns the peak in bytes since `begin`, and updates `outside`; does not synchronise with the GPU."""
        outside_torch = self._used_outside_torch()
        if abs(outside_torch - self._last_outside) > _MAX_CHANGE:
            reported = self._reported() if self._is_reported else None
            grown = max(0, outside_torch - self._last_outside)
            self.outside = (
                min(self.outside + grown, max(self.outside, 2 * self._estimate())) if reported is None else reported
            )
            self._last_outside = outside_torch
        peak = self.outside + torch.cuda.max_memory_reserved(self._device)
        self.peak = max(self.peak, peak)
        self.allocator_peak = max(self.allocator_peak, torch.cuda.max_memory_allocated(self._device))
        return peak

    def transient(self) -> int:
        """Returns the bytes of tensors that existed at the peak since `begin` and do not exist now."""
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)

    def _used_outside_torch(self) -> int:
        """Returns the bytes that all processes use, without those of this process's torch allocator."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def _reported(self) -> int | None:
        """Returns the bytes outside torch's allocator, or None if the driver does not report this process's usage."""
        answer = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
        used = parse_use(answer, self.uuid, os.getpid())
        reserved = torch.cuda.memory_reserved(self._device)
        # In a container this process's ID may be another process's on the host.
        return None if used is None or used < reserved else used - reserved

    def _increase_at_start(self) -> int | None:
        """Returns how much the GPU's usage rose when CUDA started in this process; None if that was before.

        The result includes what other programs have taken since, so it is limited to twice the estimate.
        """
        uuid = self.uuid
        if uuid not in _used_before_start:
            before = parse_use(gpu_use_at_first(), uuid)
            begun_now = before is not None and self._used_outside_torch() - before > _MIN_CONTEXT
            _used_before_start[uuid] = before if begun_now else None
        before = _used_before_start[uuid]
        return None if before is None else min(max(0, self._used_outside_torch() - before), 2 * self._estimate())

    def _estimate(self) -> int:
        """Returns the bytes outside torch's allocator, as measured on an H100, with the current stacks."""
        return CONTEXT + stacks.reserved(self._device)

    @property
    def uuid(self) -> str:
        """The GPU's own name, which nvidia-smi knows it by, too."""
        return str(torch.cuda.get_device_properties(self._device).uuid)


@contextmanager
def capped(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yields a function that caps torch's allocator at a number of bytes; restores the cap on exit.

    Beyond its cap the allocator raises an out-of-memory error. On a CPU the function does nothing.
    """
    if device.type != "cuda":
        yield lambda size: None
        return
    # Here torch takes a device's index, or None for the current GPU.
    before = torch.cuda.get_per_process_memory_fraction(device.index)

    def cap(size: int) -> None:
        fraction = max(0, size) / devices.total_memory(device)
        torch.cuda.set_per_process_memory_fraction(min(before, fraction), device.index)

    try:
        yield cap
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.index)


def held(device: torch.device) -> int:
    """Returns the bytes that this process uses now, on a GPU those of tensors and of torch's cache."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident()
