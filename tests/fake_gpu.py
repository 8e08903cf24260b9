"""Simulates a GPU on machines without one: replaces what torch and the driver report."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from sebp_edge.machine import process, stacks

GB = 10**9
H100 = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048, uuid="aa-1")


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


def simulate_h100(monkeypatch, driver):
    """Makes torch report an H100 with this driver."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(stacks, "_driver", lambda: driver)


class Gpu:
    """A GPU of 24 GB.

    Attributes:
        used: bytes used by all processes, without stacks.
        reserved: bytes reserved by torch's allocator.
        reported: bytes outside of it that the driver reports for this process; None if it reports none.
        fraction: the share of the memory that torch's allocator may take.
    """

    def __init__(self, monkeypatch, reported, before="", driver=None):
        self.used, self.reserved, self.reported = 3 * GB, GB, reported
        self.fraction = 1.0
        self.driver = driver or Driver(1024)
        simulate_h100(monkeypatch, self.driver)
        process._used_before_start.clear()
        monkeypatch.setattr(process, "nvidia_smi", lambda query: before)
        for name in ("memory_reserved", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.reserved)
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.reserved // 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * GB - self.used - self._stacks, 24 * GB))
        monkeypatch.setattr(process.GpuMemory, "_reported", lambda memory: self.reported)

        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set_fraction)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)

    def _set_fraction(self, fraction, device):
        self.fraction = fraction

    @property
    def _stacks(self):
        return self.driver.limit * 132 * 2048
