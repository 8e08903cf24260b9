"""Kills, full disks, power cuts and many processes at once: see `tests/helpers/store_faults.py`.

SEBP_EDGE_KILLS sets how many operations are killed at random instants; that script runs more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "store_faults.py"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")]


def run(folder, mode, *arguments):
    command = [sys.executable, str(SCRIPT), mode, str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_kills_at_random_instants_lose_no_version_and_leave_none_half_visible(tmp_path):
    count = int(os.environ.get("SEBP_EDGE_KILLS", "12"))
    assert run(tmp_path, "kills", count, 1)["kills"] == count


def test_kills_between_file_events_lose_no_version_and_leave_none_half_visible(tmp_path):
    assert run(tmp_path, "events", 30)["faults"] > 12


def test_a_disk_that_fills_up_at_any_write_loses_no_version_and_is_one_sentence(tmp_path):
    assert run(tmp_path, "full", 12)["faults"] > 10


def test_a_power_cut_loses_nothing_that_was_reported_and_leaves_no_version_half_visible(tmp_path):
    assert run(tmp_path, "power", 12)["cuts"] > 12


def test_processes_that_write_and_read_at_once_lose_no_version_and_see_none_half_visible(tmp_path):
    found = run(tmp_path, "crowd", 1)
    assert found["saves"] > 3
    assert found["reads"] >= 3  # one of each process
