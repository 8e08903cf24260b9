"""While libraries are imported, the weights are read and the GPU's driver starts."""

import ctypes
import os
import shutil
import sys

import psutil
import pytest

from sebp_edge.cli import adapt
from sebp_edge.machine import host


class Driver:
    """A driver that records its calls."""

    def __init__(self, fails=False, asked=None):
        self.calls, self._fails, self._asked = [], fails, asked

    def cuInit(self, flags):
        if self._asked is not None:
            assert self._asked.exists()
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
    for thread in adapt.begin_ahead(model, device):
        thread.join()


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_context_of_the_gpu_is_made_after_its_use_is_asked(
    monkeypatch, load_driver, tmp_path, model_folder, device, index
):
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\n: > {asked}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host.gpu_use_at_first.cache_clear()
    driver = Driver(asked=asked)
    load_driver(lambda name: driver)
    begin(model_folder, device)
    host.gpu_use_at_first.cache_clear()
    assert driver.calls == [("init", 0), ("get", index), ("retain", 10 + index)]


def test_a_driver_that_fails_or_is_not_there_is_left_alone(load_driver, model_folder):
    failing = Driver(fails=True)
    load_driver(lambda name: failing)
    begin(model_folder, None)
    assert "retain" not in dict(failing.calls)

    def missing(name):
        raise OSError(name)

    load_driver(missing)
    begin(model_folder, None)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_no_gpu_starts_for_another_device(load_driver, model_folder, device):
    driver = Driver()
    load_driver(lambda name: driver)
    begin(model_folder, device)
    assert driver.calls == []


def bytes_read(model):
    before = psutil.Process().io_counters().read_chars
    begin(model, "cpu")
    return psutil.Process().io_counters().read_chars - before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's count of what a process reads")
def test_weights_are_read_if_they_fit_into_memory(model_folder, tmp_path):
    size = sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
    assert size > 0
    assert bytes_read(model_folder) >= size
    large = shutil.copytree(model_folder, tmp_path / "large")
    with (large / "model-2.safetensors").open("wb") as second:  # nothing but its size
        second.truncate(psutil.virtual_memory().total)
    assert bytes_read(large) < size
    for nothing in (tmp_path, tmp_path / "none", "no model", "llama-3.2-3b"):
        assert bytes_read(nothing) < size
