"""While other programs need the cores, threads that compute are made to sleep as they wait; no result changes."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from served import wait_until as until

from sebp_edge.basics.children import ending_with_this
from sebp_edge.machine import crowding
from sebp_edge.machine.crowding import Crowding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/stat")
CPU = torch.device("cpu")


OWN = ("sebp-edge crowding", "sebp-edge holds threads")


def names():
    """The threads that watch, or are held; others may be left of earlier tests."""
    return [thread.name for thread in threading.enumerate() if thread.name in OWN]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_cores(two_threads):
    """This process has two cores."""
    usual = os.sched_getaffinity(0)
    if len(usual) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, sorted(usual)[:2])
    yield
    os.sched_setaffinity(0, usual)


class Others:
    """What other programs use of this process's cores: so many from now on, once it is called."""

    def __init__(self):
        self._rate, self._since, self._total = 0.0, time.perf_counter(), 0.0

    def used(self):
        now = time.perf_counter()
        return now, self._total + self._rate * (now - self._since)

    def __call__(self, cores):
        self._since, self._total = self.used()
        self._rate = cores


@pytest.fixture
def others(two_cores, monkeypatch):
    others = Others()
    monkeypatch.setattr(crowding, "_used", others.used)
    return others


def test_threads_are_held_while_others_need_the_cores(others):
    crowd = Crowding()
    with crowd.watched(CPU):
        others(0.1)
        until(lambda: names() == ["sebp-edge crowding"])
        others(1.0)
        until(lambda: "sebp-edge holds threads" in names())
        assert crowd.is_crowded
        others(0.0)
        until(lambda: names() == ["sebp-edge crowding"])
        others(2.0)
        until(lambda: "sebp-edge holds threads" in names())
    until(lambda: not names())
    assert crowd.is_crowded  # so that the next call need not look first
    with crowd.watched(CPU):
        until(lambda: "sebp-edge holds threads" in names())
    until(lambda: not names())


def test_nothing_is_watched_with_one_thread_or_on_a_gpu(two_threads):
    with Crowding().watched(torch.device("cuda")):
        assert not names()
    torch.set_num_threads(1)
    with Crowding().watched(CPU):
        assert not names()


def test_no_bit_changes(others):
    generator = torch.Generator().manual_seed(int(time.time()))
    x, weight = torch.randn(70, 512, generator=generator), torch.randn(300, 512, generator=generator)
    expected = torch.nn.functional.linear(x, weight).softmax(-1)
    others(2.0)
    with Crowding().watched(CPU):
        until(lambda: "sebp-edge holds threads" in names())
        assert torch.equal(torch.nn.functional.linear(x, weight).softmax(-1), expected)


@pytest.mark.slow
def test_busy_processes_crowd_their_cores(two_threads):
    usual = os.sched_getaffinity(0)
    cores = sorted(usual)[:2]
    busy = ending_with_this([sys.executable, "-c", "while True: pass"])
    processes = [subprocess.Popen(busy) for _ in range(4)]
    os.sched_setaffinity(0, cores)
    try:
        for process in processes:
            psutil.Process(process.pid).cpu_affinity(cores)
        crowd = Crowding()
        with crowd.watched(CPU):
            until(lambda: crowd.is_crowded and "sebp-edge holds threads" in names())
    finally:
        os.sched_setaffinity(0, usual)
        for process in processes:
            process.kill()
            process.wait()
