"""Devices: which one is chosen, what it computes in, and what is said of the others."""

import sys
from types import SimpleNamespace

import pytest
import torch
from command import python

from sebp_edge import Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.errors import MachineError, OptionError
from sebp_edge.machine import devices

CPU = torch.device("cpu")


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_weights_are_bf16_if_the_gpu_supports_it(machine, bf16, expected):
    machine.has_gpus(1, bf16=bf16)
    assert devices.pick_dtype(torch.device("cuda")) is expected
    assert devices.lacks_bf16(torch.device("cuda")) is not bf16
    assert devices.pick_dtype(CPU) is torch.float32


@pytest.fixture
def rates(monkeypatch, own_home):
    """The FLOP/s of this CPU in fp32 and in bf16, as if measured anew by each process."""
    rates = {torch.float32: 2e11, torch.bfloat16: 8e11}
    monkeypatch.setattr(devices, "matmul_rate", lambda device, dtype: rates[dtype])
    devices.multiplies_bf16.cache_clear()
    yield rates
    devices.multiplies_bf16.cache_clear()


def test_on_a_cpu_that_multiplies_bf16_fast_wide_models_are_in_bf16(rates):
    assert [devices.pick_dtype(CPU, width) for width in (0, 256, 511, 512, 4096)] == [torch.float32] * 3 + [
        torch.bfloat16
    ] * 2


def test_what_a_cpu_multiplies_fast_is_measured_once_and_kept(rates, own_home):
    for slower in (8e11, 1e11):
        rates[torch.bfloat16] = slower
        assert devices.pick_dtype(CPU, 512) is torch.bfloat16
        devices.multiplies_bf16.cache_clear()
    (kept,) = own_home.rglob("bf16-*.json")
    for damaged in ("", "[]", '{"torch": 1}', kept.read_text().replace(torch.__version__, "0.0")):
        kept.write_text(damaged)
        assert devices.pick_dtype(CPU, 512) is torch.float32
        devices.multiplies_bf16.cache_clear()


MULTIPLYING = """
import re
from pathlib import Path
import torch
from sebp_edge.machine import devices
devices.multiplies_bf16()
def megabytes():
    devices.release_memory(torch.device("cpu"))
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3
def multiply(rows):
    for outputs, inputs in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        weight = torch.ones(outputs, inputs, dtype=torch.bfloat16)
        (torch.ones(rows, inputs, dtype=torch.bfloat16) @ weight.T) @ weight
multiply(200)
before = megabytes()
for rows in range(201, 261):
    multiply(rows)
print(megabytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
def test_products_of_many_sizes_in_bf16_leave_little_in_memory():
    assert float(python(MULTIPLYING)) < 60


def test_4_bits_on_an_unsupported_device_are_refused(two_layer_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__spec__="installed"))
    with pytest.raises(MachineError, match=r"runs on NVIDIA GPUs and CPUs, not on mps; use 16 bits\.$"):
        load_base_model(resolve(two_layer_folder), Recipe.load("notes").replace(load_in_4bit=True), torch.device("mps"))


def test_the_best_device_is_chosen_and_an_unusable_one_refused(machine):
    machine.has_gpus(0)
    assert devices.pick_device() == CPU
    for wanted in ("cuda", "cpu:1", "cuda:0"):
        with pytest.raises(MachineError, match="choose from cpu"):
            devices.pick_device(wanted)
    for wanted in ("tpu", "cpu:x", "cpu:", "cpu:²", "", 0):
        with pytest.raises(OptionError, match=r"^Unknown device .*; choose from cpu"):
            devices.pick_device(wanted)
    machine.has_gpus(2)
    assert devices.pick_device() == torch.device("cuda")
    assert devices.pick_device("cuda:1") == torch.device("cuda:1")
    assert devices.pick_device("cpu") == CPU
    with pytest.raises(MachineError, match="choose from cuda, cpu"):
        devices.pick_device("cuda:2")


def test_a_cuda_build_without_a_driver_is_reported(machine):
    machine.has_gpus(0, cuda=None)
    assert devices.driver_problem() is None
    machine.has_gpus(0)
    assert "built for CUDA 13.0 but finds no usable NVIDIA driver" in devices.driver_problem()
    machine.has_gpus(1)
    assert devices.driver_problem() is None


def test_a_training_on_one_of_several_gpus_says_how_to_use_the_others(machine):
    machine.has_gpus(2)
    assert devices.unused_gpus(CPU) is None
    assert "One of 2 GPUs is used, cuda:1; choose another by device='cuda:0'" in devices.unused_gpus(
        torch.device("cuda:1")
    )
    machine.has_gpus(1)
    assert devices.unused_gpus(torch.device("cuda")) is None


def test_measuring_the_machine_leaves_the_random_state_unchanged():
    before = torch.get_rng_state()
    assert devices.matmul_rate(CPU, torch.float32) > 1e6
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < devices.free_memory(CPU) <= devices.total_memory(CPU)
