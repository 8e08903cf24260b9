"""The memory reserved for the stacks of a GPU's threads is counted, lowered and restored."""

import pytest
import torch
from fake_gpu import H100, Driver, simulate

from sebp_edge.machine import stacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_an_h100(monkeypatch):
    """A function that simulates an H100 with a given driver."""

    return lambda driver: simulate(monkeypatch, H100(driver))


def test_stacks_are_reserved_for_every_thread_that_can_run_at_once(on_an_h100):
    on_an_h100(Driver(1024))
    assert stacks.reserved(CUDA) == 1024 * 132 * 2048
    assert stacks.min_reserved(CUDA) == 256 * 132 * 2048


def test_lowered_stacks_are_restored_even_after_an_error(on_an_h100):
    driver = Driver(2048)
    on_an_h100(driver)
    with pytest.raises(ZeroDivisionError), stacks.lowered(CUDA):
        assert driver.limit == 256
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA)
        _ = 1 / 0
    assert driver.limit == 2048


def test_a_driver_that_refuses_a_limit_keeps_its_own(on_an_h100):
    on_an_h100(Driver(1024, refuses_to_set=True))
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == 1024 * 132 * 2048
    on_an_h100(Driver(1024, refuses_to_report=True))
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA) == 1024 * 132 * 2048


def test_stacks_are_not_counted_on_amd_gpus(on_an_h100, monkeypatch):
    on_an_h100(None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA) == 0


def test_smaller_stacks_are_not_changed(on_an_h100):
    driver = Driver(128)
    on_an_h100(driver)
    with stacks.lowered(CUDA):
        assert driver.limit == 128
    assert stacks.min_reserved(CUDA) == 128 * 132 * 2048


def test_without_a_driver_stacks_are_assumed_to_have_the_usual_size(on_an_h100):
    on_an_h100(None)
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA) == 1024 * 132 * 2048


def test_on_the_cpu_no_stacks_are_lowered(on_an_h100):
    on_an_h100(object())  # a driver that cannot be queried
    with stacks.lowered(CPU):
        pass
