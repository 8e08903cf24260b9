"""While libraries are imported, the weights are read and the GPU's driver starts."""

import ctypes
import sys

import psutil
import pytest

from sebp_edge.cli import ahead


class Driver:
    """A driver that records its calls."""

    def __init__(self, fails=False):
        self.calls, self._fails = [], fails

    def cuInit(self, flags):
        self.calls.append(("init", flags))
        return int(self._fails)

    def cuDeviceGet(self, address, index):
        ctypes.cast(address, ctypes.POINTER(ctypes.c_int)).contents.value = 10 + index
        self.calls.append(("get", index))
        return int(self._fails)

    def cuDevicePrimaryCtxRetain(self, address, gpu):
        self.calls.append(("retain", gpu.value))
        return 0


def begin(model, device):
    for thread in ahead.begin_ahead(model, device):
        thread.join()


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_context_of_the_gpu_is_made_after_its_use_is_asked(monkeypatch, model_folder, device, index):
    driver = Driver()
    monkeypatch.setattr(ahead, "gpu_use_at_first", lambda: driver.calls.append("use"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begin(model_folder, device)
    assert driver.calls == ["use", ("init", 0), ("get", index), ("retain", 10 + index)]


def test_a_driver_that_fails_or_is_not_there_is_left_alone(monkeypatch, model_folder):
    failing = Driver(fails=True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: failing)
    begin(model_folder, None)
    assert "retain" not in dict(failing.calls)

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    begin(model_folder, None)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_no_gpu_starts_for_another_device(monkeypatch, model_folder, device):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begin(model_folder, device)
    assert driver.calls == []


def bytes_read(model):
    before = psutil.Process().io_counters().read_chars
    begin(model, "cpu")
    return psutil.Process().io_counters().read_chars - before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's count of what a process reads")
def test_weights_are_read_if_they_fit_into_memory(monkeypatch, model_folder, tmp_path):
    size = sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
    assert size > 0
    assert bytes_read(model_folder) >= size
    monkeypatch.setattr(ahead, "free_host_memory", lambda: 2 * size - 1)
    assert bytes_read(model_folder) < size
    for nothing in (tmp_path, tmp_path / "none", "no model", "llama-3.2-3b"):
        assert bytes_read(nothing) < size
