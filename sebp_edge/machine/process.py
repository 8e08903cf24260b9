"""What this process holds of a device's memory, and a cap on what torch takes of it.

Of a GPU that is torch's allocator and what is outside of it: CUDA's context, libraries, kernels, captured graphs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from sebp_edge.machine import devices, stacks

# What a process was measured to hold on an H100 outside torch's allocator and beside its threads' stacks, when all that
# a training needs was loaded: 0.63 to 0.64 GB, with bitsandbytes 0.67.
CONTEXT = 680_000_000
# Changes of what is used on a GPU that are not looked into: the driver's answer takes longer than a step.
_UNNOTICED = 32 * 2**20
# What others held of a GPU, by its UUID, when CUDA began here; None where that was not seen.
_others: dict[str, int | None] = {}
# A context is larger than this: if so much more is used after a call, that has made it.
_LEAST_CONTEXT = 100 * 2**20
# Where Linux tells of this process.
_STATUS = Path("/proc/self/status")


def memory_of(device: torch.device) -> "GpuMemory | HostMemory":
    """What this process holds of the memory that `device` computes in."""
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


class HostMemory:
    """The host's memory: all that is resident.

    Attributes:
        peak: bytes held at most, as far as it was seen.
        allocator_peak: None; torch does not count here.
        cached: bytes that are held for later use; the heap does not tell.
        outside: bytes outside of what is capped; nothing is.
        is_capped: whether memory runs out at the cap; here what is taken can only be seen.
    """

    allocator_peak, cached, outside, outside_expected, is_capped = None, 0, 0, 0, False

    def __init__(self):
        self.peak = 0
        self.begin()

    def begin(self) -> None:
        """Begins to measure anew."""
        self._highest_before, self._most = peak_resident(), 0

    @property
    def held(self) -> int:
        """Bytes held now."""
        return resident()

    def planned_besides(self, loaded: int) -> int:
        """Bytes that a plan must count beside a training's own, of which `loaded` are here already."""
        return max(0, resident() - loaded)

    def measure(self) -> int:
        """Bytes held at most since `begin`: beyond all that was held before exactly, below that as seen by this."""
        highest = peak_resident()
        self._most = max(self._most, resident(), highest if highest > self._highest_before else 0)
        self.peak = max(self.peak, self._most)
        return self._most

    def transient(self) -> int:
        """Bytes of it that are held no more."""
        return self.measure() - resident()


class GpuMemory:
    """A GPU's memory. What is outside torch's allocator the driver tells, of each process, on most Linux machines.

    Elsewhere (in containers, on Windows) it tells only what all processes hold together. There it is what came when
    CUDA began here, or if that was not seen, what a process was measured to hold on an H100; and by how much more is
    used since this was made, up to as much again: that may be other programs' too, so it is rather too much.

    Attributes:
        outside: bytes outside torch's allocator, as last measured.
        peak: bytes that the process held at most, as far as it was seen.
        allocator_peak: bytes of tensors at most.
        is_capped: whether memory runs out at the cap.
    """

    is_capped = True

    def __init__(self, device: torch.device):
        self._device = device
        self.peak = self.allocator_peak = 0
        seen = self._seen()
        self._beyond = self._used_beyond_torch()
        told = self._told()
        self.outside = told if told is not None else seen if seen is not None else self._estimate()

    def begin(self) -> None:
        """Begins to measure anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self.outside + torch.cuda.memory_reserved(self._device)

    @property
    def cached(self) -> int:
        """Bytes that torch holds for tensors to come."""
        return torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def planned_besides(self, loaded: int) -> int:
        """Bytes that a plan must count beside a training's own, of which `loaded` are here already."""
        return self.outside_planned + max(0, torch.cuda.memory_allocated(self._device) - loaded)

    @property
    def outside_planned(self) -> int:
        """Bytes that will be outside torch's allocator with small stacks: an estimate, as kernels and graphs are still
        to be loaded."""
        return self._outside_with(stacks.least_held(self._device))

    @property
    def outside_expected(self) -> int:
        """The same with the stacks that there are."""
        return self._outside_with(stacks.held(self._device))

    def _outside_with(self, held: int) -> int:
        return max(CONTEXT + held, self.outside - (stacks.held(self._device) - held))

    def measure(self) -> int:
        """Bytes held at most since `begin`; what is outside torch's allocator is measured anew. The GPU is not
        waited for."""
        beyond = self._used_beyond_torch()
        if abs(beyond - self._beyond) > _UNNOTICED:
            told = self._told()
            grown = max(0, beyond - self._beyond)
            self.outside = min(self.outside + grown, max(self.outside, 2 * self._estimate())) if told is None else told
            self._beyond = beyond
        most = self.outside + torch.cuda.max_memory_reserved(self._device)
        self.peak = max(self.peak, most)
        self.allocator_peak = max(self.allocator_peak, torch.cuda.max_memory_allocated(self._device))
        return most

    def transient(self) -> int:
        """Bytes of tensors that were there at most since `begin`, and are not now."""
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)

    def _used_beyond_torch(self) -> int:
        """Bytes that all processes use, but for this one's in torch's allocator."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def _told(self) -> int | None:
        """Bytes outside torch's allocator by what the driver says that this process holds; None if it does not."""
        held = held_by(os.getpid(), self._uuid(), _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory"))
        reserved = torch.cuda.memory_reserved(self._device)
        # Outside of a container another process may have our number.
        return None if held is None or held < reserved else held - reserved

    def _seen(self) -> int | None:
        """The same, by what was used before CUDA began here; None if it had begun before this was first asked.

        What others took since is in it, so it is held to twice what a process was measured to hold.
        """
        uuid = self._uuid()
        if uuid not in _others:
            before = used_of(uuid, _nvidia_smi("--query-gpu=uuid,memory.used"))
            begun_now = before is not None and self._used_beyond_torch() - before > _LEAST_CONTEXT
            _others[uuid] = before if begun_now else None
        before = _others[uuid]
        return None if before is None else min(max(0, self._used_beyond_torch() - before), 2 * self._estimate())

    def _estimate(self) -> int:
        """Bytes outside torch's allocator with the stacks that there are."""
        return CONTEXT + stacks.held(self._device)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)


def _nvidia_smi(query: str) -> str:
    """What the driver's tool answers, a line for each thing asked about; nothing where it is not there."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def held_by(process: int, gpu: str, answer: str) -> int | None:
    """Bytes that a process holds of a GPU, from nvidia-smi's lines "GPU-uuid, process, MiB"; None if not among them."""
    for line in answer.splitlines():
        match line.split(", "):
            case [uuid, number, size] if uuid.endswith(gpu) and number == str(process) and size.isdecimal():
                return int(size) * 2**20
    return None


def used_of(gpu: str, answer: str) -> int | None:
    """Bytes that are used of a GPU, from nvidia-smi's lines "GPU-uuid, MiB"; None if not among them."""
    for line in answer.splitlines():
        match line.split(", "):
            case [uuid, size] if uuid.endswith(gpu) and size.isdecimal():
                return int(size) * 2**20
    return None


@contextmanager
def capped(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Gives what caps torch's allocator at a number of bytes of a GPU, as often as wanted; undone in the end.

    Beyond its cap it is out of memory. A CPU has no cap.
    """
    if device.type != "cuda":
        yield lambda size: None
        return
    # torch takes a number here, or None for the current GPU.
    before = torch.cuda.get_per_process_memory_fraction(device.index)

    def cap(size: int) -> None:
        fraction = max(0, size) / devices.total_memory(device)
        torch.cuda.set_per_process_memory_fraction(min(before, fraction), device.index)

    try:
        yield cap
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.index)


def resident() -> int:
    """Bytes of the host's memory that this process holds now."""
    return psutil.Process().memory_info().rss


def peak_resident() -> int:
    """Bytes of the host's memory that this process held at most, ever."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if _STATUS.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    import resource

    # On Linux that may be the peak of the process that started this one.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
