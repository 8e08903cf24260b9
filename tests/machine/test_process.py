"""The memory that a process uses, the limits of containers, and the reports of a GPU's driver are read correctly."""

import sys

import psutil
import pytest
import torch
from command import python
from failing_memory import Failing
from fake_gpu import GB, Driver, Gpu

from sebp_edge.errors import MachineError
from sebp_edge.machine import devices, host, process

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# --------------------------------------------------------------------------------------------------------- containers


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_in_version_2_the_limits_of_all_parent_groups_apply(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/app.slice/ours\n",
            "sys/fs/cgroup/app.slice/memory.max": "8000\n",
            "sys/fs/cgroup/app.slice/memory.current": "5000\n",
            "sys/fs/cgroup/app.slice/memory.stat": "anon 3000\ninactive_file 1500\n",
            "sys/fs/cgroup/app.slice/ours/memory.max": "max\n",
            "sys/fs/cgroup/app.slice/ours/memory.current": "900\n",
            "sys/fs/cgroup/app.slice/ours/memory.stat": "anon 900\n",
        },
    )
    # The kernel reclaims cached files before it refuses an allocation.
    assert list(host.limits(tmp_path)) == [(8000, 4500)]


def test_in_version_1_limits_are_found_inside_a_container(tmp_path):
    top = "sys/fs/cgroup/memory/"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n",
            top + "memory.limit_in_bytes": "700\n",
            top + "memory.usage_in_bytes": "900\n",
            top + "memory.stat": "total_inactive_file 50\n",
        },
    )
    assert list(host.limits(tmp_path)) == [(700, 0)]


def test_without_control_groups_there_are_no_limits(tmp_path):
    assert list(host.limits(tmp_path)) == []
    write(tmp_path, {"proc/self/cgroup": "0::/ours\n"})
    assert list(host.limits(tmp_path)) == []


def test_memory_is_that_within_the_containers_limits(monkeypatch):
    assert devices.free_memory(CPU) <= psutil.virtual_memory().available * 1.1
    monkeypatch.setattr(host, "limits", lambda: iter([(3 * GB, GB // 10), (2 * GB, GB)]))
    assert devices.total_memory(CPU) == 2 * GB
    assert devices.free_memory(CPU) == GB // 10


# --------------------------------------------------------------------------------------------------------- host memory


PROCESS = """
import sys
import torch
from sebp_edge.machine.process import HostMemory
memory = HostMemory()
first = memory.measure()
some = torch.ones(50_000_000)
with_some = memory.used
del some
later = memory.measure(), memory.transient(), memory.peak
memory.begin()
print(first, with_some, *later, memory.measure(), memory.peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="when the heap releases memory depends on the system")
def test_the_peak_between_measurements_is_reported():
    first, with_some, later, transient, peak, anew, peak_anew = map(int, python(PROCESS).split())
    assert with_some - first == pytest.approx(2e8, rel=0.05)
    assert later == pytest.approx(with_some, rel=0.02)
    assert transient == pytest.approx(2e8, rel=0.05)
    assert peak == peak_anew == later
    assert anew == pytest.approx(first, rel=0.05)


def test_too_little_memory_to_measure_the_speed_raises_one_sentence():
    devices._measured_matmul_rate.cache_clear()
    refused = pytest.raises(MachineError, match=r"Too little memory is free on this CPU .*; close other programs")
    with refused, Failing(1):
        devices.matmul_rate(torch.device("cpu"), torch.float32)


# ---------------------------------------------------------------------------------------------------------- GPU memory


ANSWER = """GPU-aa-1, 40, 512
GPU-aa-2, 4, 100
GPU-aa-1, 4, 700
GPU-aa-1, 5, [N/A]
No running processes found
"""


def test_the_drivers_report_is_read_for_this_process_and_gpu():
    assert process.parse_use(ANSWER, "aa-1", 4) == 700 * 2**20
    assert process.parse_use(ANSWER, "aa-2", 4) == 100 * 2**20
    assert process.parse_use(ANSWER, "aa-1", 5) is None
    assert process.parse_use(ANSWER, "aa-1", 6) is None
    assert process.parse_use("", "aa-1", 4) is None
    # Of all processes together:
    assert process.parse_use("GPU-aa-1, 0\nGPU-aa-2, 812\n", "aa-2") == 812 * 2**20
    assert process.parse_use("GPU-aa-1, 0\n", "aa-3") is None
    assert process.parse_use("GPU-aa-1, [N/A]\n", "aa-1") is None


STACKS = 1024 * 132 * 2048
ESTIMATE = process.CONTEXT + STACKS


def test_memory_outside_the_allocator_is_what_the_driver_reports(monkeypatch):
    gpu = Gpu(monkeypatch, reported=300_000_000)
    memory = process.memory_of(CUDA)
    assert memory.used == GB + 300_000_000
    # The plan includes kernels that are loaded later.
    assert memory.outside_planned == process.CONTEXT + STACKS // 4
    gpu.used, gpu.reported = gpu.used + 5 * GB, 420_000_000
    assert memory.measure() == memory.peak == GB + 420_000_000
    assert memory.planned_overhead(loaded=0) == process.CONTEXT + STACKS // 4 + GB // 2


def test_without_a_report_the_estimate_grows_with_use_up_to_twice(monkeypatch):
    gpu = Gpu(monkeypatch, reported=None)
    memory = process.memory_of(CUDA)
    assert memory.outside == ESTIMATE
    # More tensors do not count as growth outside.
    gpu.used, gpu.reserved = gpu.used + GB, gpu.reserved + GB
    assert memory.measure() == 2 * GB + ESTIMATE
    gpu.used += 100_000_000
    assert memory.measure() == 2 * GB + ESTIMATE + 100_000_000
    gpu.used -= 10**8
    assert memory.measure() == 2 * GB + ESTIMATE + 100_000_000
    gpu.used += 5 * GB
    assert memory.measure() == 2 * GB + 2 * ESTIMATE


def test_without_a_report_the_increase_at_the_start_of_cuda_counts(monkeypatch):
    gpu = Gpu(monkeypatch, reported=None, before=f"GPU-aa-1, {1200}")
    gpu.used = gpu.reserved + 1200 * 2**20 + 480_000_000 - STACKS
    memory = process.memory_of(CUDA)
    assert memory.outside == 480_000_000
    gpu.used += 100_000_000
    memory.measure()
    assert memory.outside == 580_000_000
    # A second measurement gives the same.
    assert process.memory_of(CUDA).outside == 580_000_000


def test_memory_that_other_programs_take_later_counts_up_to_twice_the_estimate(monkeypatch):
    gpu = Gpu(monkeypatch, reported=None, before="GPU-aa-1, 0")
    gpu.used = gpu.reserved + 480_000_000 - STACKS
    assert process.memory_of(CUDA).outside == 480_000_000
    gpu.used += 10 * GB
    assert process.memory_of(CUDA).outside == 2 * ESTIMATE


def test_without_a_report_after_the_start_of_cuda_the_estimate_counts(monkeypatch):
    gpu = Gpu(monkeypatch, reported=None, before="GPU-aa-1, 2000")
    gpu.used = gpu.reserved + 2000 * 2**20 - STACKS
    assert process.memory_of(CUDA).outside == ESTIMATE
    gpu.used += 300_000_000
    assert process.memory_of(CUDA).outside == ESTIMATE


def test_the_cap_follows_the_memory_outside_the_allocator(monkeypatch):
    from sebp_edge.engine.memory.guard import STEPS_BETWEEN_CHECKS, MemoryGuard

    gpu = Gpu(monkeypatch, reported=300_000_000)
    released = []
    monkeypatch.setattr(devices, "release_memory", lambda device: released.append(gpu.reserved))
    with pytest.raises(ZeroDivisionError), MemoryGuard(CUDA, budget=3 * GB) as guard:
        assert gpu.driver.limit == 256
        assert gpu.fraction * 24 * GB == pytest.approx(3 * GB - process.CONTEXT - STACKS // 4)
        gpu.used, gpu.reported = gpu.used + 10**8, 400_000_000
        assert [guard.shortfall() for _ in range(STEPS_BETWEEN_CHECKS)] == [0] * STEPS_BETWEEN_CHECKS
        assert gpu.fraction * 24 * GB == pytest.approx(3 * GB - 400_000_000)
        assert not released
        gpu.reserved += 2 * GB
        gpu.used += 2 * GB
        assert [guard.shortfall() for _ in range(STEPS_BETWEEN_CHECKS)][-1] == 400_000_000
        assert released
        _ = 1 / 0
    assert gpu.fraction == 1.0
    assert gpu.driver.limit == 1024


def test_the_cap_leaves_room_for_stacks_that_cannot_be_lowered(monkeypatch):
    from sebp_edge.engine.memory.guard import MemoryGuard

    gpu = Gpu(monkeypatch, reported=300_000_000, driver=Driver(1024, refuses_to_set=True))
    with MemoryGuard(CUDA, budget=3 * GB):
        assert gpu.fraction * 24 * GB == pytest.approx(3 * GB - process.CONTEXT - STACKS)


def test_an_interruption_while_the_guard_starts_restores_the_stacks(monkeypatch):
    from sebp_edge.engine.memory.guard import MemoryGuard

    gpu = Gpu(monkeypatch, reported=300_000_000)
    guard, limits = MemoryGuard(CUDA, budget=3 * GB), []

    def interrupt(device):
        limits.append(gpu.driver.limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "memory_of", interrupt)
    with pytest.raises(KeyboardInterrupt) as stopped:
        guard.__enter__()
    assert limits == [256]
    assert gpu.driver.limit == 1024
    assert stopped  # Its frames are still alive.
