"""While other programs need the cores, threads that compute are made to sleep as they wait; no result changes."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from served import SECONDS

from sebp_edge.basics.children import ending_with_this
from sebp_edge.machine import crowding
from sebp_edge.machine.crowding import Crowding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/stat")
CPU = torch.device("cpu")


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sebp-edge")]


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def others(monkeypatch, two_threads):
    """A function that sets how many cores others use from now on; this process is taken to have two."""
    state = {"rate": 0.0, "since": time.perf_counter(), "used": 0.0}

    def used():
        now = time.perf_counter()
        return now, state["used"] + state["rate"] * (now - state["since"])

    def use(cores):
        now, total = used()
        state.update(rate=cores, since=now, used=total)

    monkeypatch.setattr(crowding, "_used", used)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return use


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
