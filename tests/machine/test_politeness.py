"""What is polite: the values that are taken, low priority of a process, battery power."""

import json
import os
import random
import sys
from functools import partial

import psutil
import pytest
from command import start
from fake_machine import write_supplies

from sebp_edge import Politeness
from sebp_edge.errors import OptionError
from sebp_edge.machine.politeness import NICENESS, is_on_battery

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc and /sys")


@pytest.mark.parametrize(
    "values",
    [*({"threads": value} for value in (0, 1025, "2", True)), *({"gpu_share": value} for value in (4, 101, 50.0))],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(OptionError, match=next(iter(values))):
        Politeness(**values)


def test_polite_alone_waits_with_half_of_the_cores_and_other_options_take_their_place():
    polite = Politeness.of(polite=True)
    assert polite.waits and polite.gpu_share == 100
    assert 1 <= polite.threads <= max(1, os.cpu_count() // 2)
    threads, share = random.randint(1, 64), random.randint(5, 100)
    assert Politeness.of(True, threads, share) == Politeness(threads=threads, gpu_share=share, waits=True)
    assert Politeness.of() == Politeness()


def test_a_share_of_the_gpu_is_refused_on_the_cpu_with_what_to_do():
    polite = Politeness(gpu_share=random.randint(5, 99))
    assert polite.on("cuda") is polite
    with pytest.raises(OptionError, match="--threads"):
        polite.on("cpu")


@needs_linux
@pytest.mark.parametrize("leads_a_session", [True, False])
def test_all_threads_of_a_process_and_its_children_get_a_low_priority(leads_a_session):
    code = f"""
import json, os, subprocess, sys, threading
from pathlib import Path
if {leads_a_session}:
    if os.getsid(0) != os.getpid():
        os.setsid()
from sebp_edge.machine.politeness import lower_priority
ends = threading.Event()
threading.Thread(target=ends.wait, daemon=True).start()
before = os.nice(0)
lower_priority()
threads = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")]
child = int(subprocess.run(["nice"], capture_output=True, text=True).stdout)
session = Path("/proc/self/autogroup")
group = session.read_text().split() if session.exists() else []  # empty in a session without a group of its own
print(json.dumps([before, threads, child, group, os.getsid(0) == os.getpid()]))
"""
    with start([code], cold=True) as one:
        told, errors = one.communicate(timeout=200)
    assert one.returncode == 0, errors
    before, threads, child, group, leads = json.loads(told)
    lowered = max(NICENESS, before)
    assert len(threads) >= 2 and set(threads) == {lowered} and child == lowered
    if leads and group:
        assert int(group[-1]) == NICENESS


@pytest.fixture
def battery(tmp_path, monkeypatch):
    """A function that writes what Linux tells of this machine's power supplies."""
    monkeypatch.setattr("psutil._pslinux.POWER_SUPPLY_PATH", str(tmp_path))

    return partial(write_supplies, tmp_path, status=None)


@needs_linux
def test_battery_power_is_what_the_system_tells(battery):
    assert not is_on_battery()  # a machine without a battery
    battery(plugged=True, status="Charging")
    assert not is_on_battery()
    battery(plugged=False, status="Discharging")
    assert is_on_battery()
    battery(plugged=True)
    assert not is_on_battery()


@needs_linux
def test_a_container_without_power_supplies_is_on_mains(battery, tmp_path):
    tmp_path.rmdir()
    assert not is_on_battery()


@needs_linux
def test_a_battery_without_a_sensor_of_the_mains_tells_by_its_state(battery):
    battery(status="Discharging")
    assert is_on_battery()
    battery(status="Unknown")
    assert not is_on_battery()


def test_a_system_without_sensors_is_on_mains(monkeypatch):
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert not is_on_battery()
