"""Simulates what a machine has: memory, GPUs, number formats, power supplies."""

import sys
from types import SimpleNamespace

import torch
from fake_gpu import FakeCuda, simulate

from sebp_edge.machine import devices
from sebp_edge.ops import backend

# What the choices of our operations are measured for.
MEASURED_ON = {"gpu": "some GPU", "driver": "13000", "torch": "2.11.0", "triton": "3.6.0"}


class _Gpus(FakeCuda):
    def __init__(self, count, bf16):
        self._count, self._bf16 = count, bf16

    def is_available(self):
        return self._count > 0

    def device_count(self):
        return self._count

    def is_bf16_supported(self, including_emulation=True):
        return self._bf16


class FakeMachine:
    """A machine that is simulated in part; the rest is this one's."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    def has_memory(self, free: int | dict[str, int], total: int | None = None) -> None:
        """Sets what is free, perhaps by kind of device, and what there is, in bytes; by default, all is free."""

        def free_on(device):
            return int(free[device.type] if isinstance(free, dict) else free)

        self._monkeypatch.setattr(devices, "free_memory", free_on)
        self._monkeypatch.setattr(devices, "total_memory", free_on if total is None else lambda device: int(total))

    def has_gpus(self, count: int, cuda: str | None = "13.0", *, bf16: bool = True) -> None:
        """Sets how many CUDA GPUs torch finds, whether they have bf16, and the CUDA that torch was built for."""
        self._monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        simulate(self._monkeypatch, _Gpus(count, bf16))
        self._monkeypatch.setattr(torch.version, "cuda", cuda)

    def computes_in(self, dtype: torch.dtype) -> None:
        """Sets the number format of weights, on every device."""
        self._monkeypatch.setattr(devices, "pick_dtype", lambda device, width=0: dtype)

    def has_libraries(self, *, triton: bool, bitsandbytes: bool) -> None:
        """Sets which optional libraries plans find."""
        self._monkeypatch.setattr(backend, "has_kernels", lambda device: triton)
        found = SimpleNamespace(__spec__="installed") if bitsandbytes else None
        self._monkeypatch.setitem(sys.modules, "bitsandbytes", found)

    def multiplies(self, rate: float) -> None:
        """Sets how many floating-point operations a second a product of matrices makes."""
        self._monkeypatch.setattr(devices, "matmul_rate", lambda device, dtype: rate)
        self._monkeypatch.setattr(devices, "bus_rate", lambda device: 24e9)


def write_supplies(folder, plugged: bool | None = None, status: str | None = "Discharging") -> None:
    """Writes what Linux tells of power supplies: whether the mains are plugged in, and the battery's state, if any."""
    battery = {"status": status, "energy_now": 7, "energy_full": 9, "power_now": 1}
    values = {"AC0": {} if plugged is None else {"online": int(plugged)}, "BAT0": battery if status else {}}
    for name, files in values.items():
        for file, value in files.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(f"{value}\n")
