"""A worker's low priority, and a job that waits on battery power: it is shown, answers go on, and it can be paused."""

import sys
from pathlib import Path

import psutil
import pytest
from fake_machine import write_supplies
from served import Server

from sebp_edge.machine.politeness import NICENESS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc and /sys"),
]
# Its worker inherits what the server has set.
SUPPLIES = """
import psutil._pslinux
psutil._pslinux.POWER_SUPPLY_PATH = {folder!r}
"""


def own_priority(server):
    return psutil.Process(server.process.pid).nice()


def priority(pid):
    """The niceness of a process, and of its session; as if it had one where Linux knows none."""
    session = Path(f"/proc/{pid}/autogroup")
    own = psutil.Process(pid).nice()
    return own, int(session.read_text().split()[-1]) if session.exists() else own


def test_a_job_that_waits_is_shown_answers_meanwhile_and_can_be_paused(tmp_path, settings, training):
    write_supplies(tmp_path / "power", plugged=True)
    recipe = Path(training["recipe"])
    recipe.write_text(recipe.read_text().replace("epochs = 5", "epochs = 1000\npatience = 1000"))
    params = training | {"name": "mine", "polite": True, "threads": 1}
    with Server(warm=True, first=SUPPLIES.format(folder=str(tmp_path / "power"))) as server:
        server.initialize(**settings)
        server.call("jobs.start", id="a", params=params)
        server.call("jobs.subscribe", id="a")
        server.event("a", lambda event: event["event"] == "step")
        write_supplies(tmp_path / "power", plugged=False)
        waiting = server.event("a", lambda event: event["event"] == "waiting")["event"]
        assert (waiting["waits_for"], waiting["holds_memory"]) == ("power", True)
        server.event("a", lambda event: event.get("phase") == "waiting")
        job = server.call("jobs.get", id="a")["job"]
        assert (job["state"], job["phase"]) == ("running", "waiting")
        model = {key: training[key] for key in ("model", "device")}
        assert priority(server.worker())[0] == own_priority(server)  # the settings of these tests ask for that
        assert "text" in server.call("generate", prompt="a boat", max_new_tokens=2, **model)
        server.call("jobs.pause", expected_job_id="a")
        assert server.state("a")["resumable"]
        server.call("jobs.resume", id="a")
        server.event("a", lambda event: event["event"] == "waiting")
        write_supplies(tmp_path / "power", plugged=True)
        server.event("a", lambda event: event["event"] == "step")
        server.call("jobs.cancel", expected_job_id="a")
        server.state("a", {"interrupted"})


def test_a_worker_of_low_priority_by_default_and_a_share_of_the_gpu_on_the_cpu_is_refused(settings, training):
    del settings["low_priority"]
    with Server(warm=True) as server:
        server.answer(server.send("initialize", protocol=1, **settings))
        server.call("jobs.start", id="a", params=training | {"name": "mine", "gpu_share": 50})
        server.call("jobs.subscribe", id="a")
        assert server.state("a")["error"]["code"] == "invalid_option"
        assert priority(server.worker()) == (max(NICENESS, own_priority(server)), NICENESS)
