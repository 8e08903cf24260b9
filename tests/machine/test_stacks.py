"""What a GPU's driver holds for its threads' stacks, and less of it for a while."""

import pytest
import torch
from fake_gpu import Driver, simulate_h100

from sebp_edge.machine import stacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_an_h100(monkeypatch):
    """Makes it a machine with an H100, whose driver is the one that is given."""

    def with_driver(driver):
        simulate_h100(monkeypatch, driver)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))

    return with_driver


def test_stacks_are_reserved_for_every_thread_that_can_run_at_once(on_an_h100):
    on_an_h100(Driver(1024))
    assert stacks.reserved(CUDA) == 1024 * 132 * 2048
    assert stacks.min_reserved(CUDA) == 256 * 132 * 2048


def test_stacks_are_small_for_a_while_also_where_that_ends_in_an_error(on_an_h100):
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


def test_for_gpus_that_are_not_nvidias_nothing_is_counted(on_an_h100, monkeypatch):
    on_an_h100(None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA) == 0


def test_stacks_that_are_smaller_already_stay_as_they_are(on_an_h100):
    driver = Driver(128)
    on_an_h100(driver)
    with stacks.lowered(CUDA):
        assert driver.limit == 128
    assert stacks.min_reserved(CUDA) == 128 * 132 * 2048


def test_where_the_driver_is_not_found_stacks_are_taken_to_be_the_usual_ones(on_an_h100):
    on_an_h100(None)
    with stacks.lowered(CUDA):
        assert stacks.reserved(CUDA) == stacks.min_reserved(CUDA) == 1024 * 132 * 2048


def test_other_devices_have_no_stacks_to_cut(monkeypatch):
    monkeypatch.setattr(stacks, "_limit", lambda device: pytest.fail("no driver is asked"))
    with stacks.lowered(CPU):
        pass
