"""Simulates a GPU on machines without one: what torch and the driver report."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from sebp_edge.machine import process, stacks

GB = 10**9
PROPERTIES = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048, uuid="aa-1")


class Driver:
    """A driver with a stack limit, which may refuse to report or to set it."""

    def __init__(self, limit, *, refuses_to_set=False, refuses_to_report=False):
        self.limit, self._refuses_to_set, self._refuses_to_report = limit, refuses_to_set, refuses_to_report

    def cuCtxGetLimit(self, address, kind):
        ctypes.cast(address, ctypes.POINTER(ctypes.c_size_t)).contents.value = self.limit
        return int(self._refuses_to_report)

    def cuCtxSetLimit(self, kind, size):
        if not self._refuses_to_set:
            self.limit = size.value
        return int(self._refuses_to_set)


class FakeCuda:
    """Stands in for `torch.cuda`: a GPU that has nothing to report; what is not defined here is torch's own."""

    _own, driver = torch.cuda, None

    def __getattr__(self, name):
        return getattr(self._own, name)

    def device(self, device):
        return nullcontext()

    def current_device(self):
        return 0


class H100(FakeCuda):
    """An H100 with this driver."""

    def __init__(self, driver):
        self.driver = driver

    def get_device_properties(self, device):
        return PROPERTIES

    def mem_get_info(self, device):
        return 0, 0


def simulate(monkeypatch, gpu):
    """Makes torch and the driver report this GPU."""
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(stacks, "driver", lambda: gpu.driver)


class Gpu(H100):
    """A GPU of 24 GB.

    Attributes:
        used: bytes used by all processes, without stacks.
        reserved: bytes reserved by torch's allocator.
        reported: bytes outside of it that the driver reports for this process; None if it reports none.
        fraction: the share of the memory that torch's allocator may take.
    """

    def __init__(self, monkeypatch, reported, before="", driver=None):
        super().__init__(driver or Driver(1024))
        self.used, self.reserved, self.reported = 3 * GB, GB, reported
        self.fraction = 1.0
        simulate(monkeypatch, self)
        process._used_before_start.clear()
        monkeypatch.setattr(process, "gpu_use_at_first", lambda: before)
        monkeypatch.setattr(process.GpuMemory, "_reported", lambda memory: self.reported)

    def memory_reserved(self, device):
        return self.reserved

    def memory_allocated(self, device):
        return self.reserved // 2

    max_memory_reserved, max_memory_allocated = memory_reserved, memory_allocated

    def mem_get_info(self, device):
        return 24 * GB - self.used - self.driver.limit * 132 * 2048, 24 * GB

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        self.fraction = fraction

    def reset_peak_memory_stats(self, device):
        pass
