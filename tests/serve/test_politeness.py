"""A worker's low priority, and a job that waits on battery power: it is shown, answers go on, and it can be paused."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from fake_machine import write_supplies
from served import Server, wait_until

NICENESS = 10
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


def priorities(pid):
    """The niceness of each thread of a process."""
    threads = [thread.id for thread in psutil.Process(pid).threads()]
    return {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


def session_is(pid, niceness):
    """Whether a process's session has this niceness, or Linux gives it none: no file, or an empty one."""
    file = Path(f"/proc/{pid}/autogroup")
    return not file.exists() or file.read_text().split()[-1:] in ([], [str(niceness)])


def test_a_job_that_waits_is_shown_answers_meanwhile_and_can_be_paused(tmp_path, settings, training):
    write_supplies(tmp_path / "power", plugged=True)
    recipe = Path(training["recipe"])
    recipe.write_text(recipe.read_text().replace("epochs = 1", "epochs = 1000\npatience = 1000"))
    params = training | {"name": "mine", "polite": True, "threads": 1}
    with Server(warm=True, first=SUPPLIES.format(folder=str(tmp_path / "power"))) as server:
        server.initialize(**settings)
        server.start_job("a", params=params)
        server.event("a", lambda event: event["event"] == "step")
        write_supplies(tmp_path / "power", plugged=False)
        waiting = server.event("a", lambda event: event["event"] == "waiting")["event"]
        assert (waiting["waits_for"], waiting["holds_memory"]) == ("power", True)
        server.event("a", lambda event: event.get("phase") == "waiting")
        job = server.call("jobs.get", id="a")["job"]
        assert (job["state"], job["phase"]) == ("running", "waiting")
        model = {key: training[key] for key in ("model", "device")}
        assert "text" in server.call("generate", prompt="a boat", max_new_tokens=2, **model)
        server.call("jobs.pause", expected_job_id="a")
        assert server.state("a")["resumable"]
        server.call("jobs.resume", id="a")
        server.event("a", lambda event: event["event"] == "waiting")
        write_supplies(tmp_path / "power", plugged=True)
        server.event("a", lambda event: event["event"] == "step")
        server.call("jobs.cancel", expected_job_id="a")
        server.state("a", {"interrupted"})


@pytest.mark.parametrize("asked", ["default", False], ids=["by default", "unless the app asks"])
def test_only_the_threads_of_a_job_have_a_low_priority_and_its_session_while_nothing_is_answered(
    settings, training, asked
):
    if asked == "default":
        del settings["low_priority"]
    recipe = Path(training["recipe"])
    recipe.write_text(recipe.read_text().replace("epochs = 1", "epochs = 1000\npatience = 1000"))
    with Server(warm=True) as server:
        server.answer(server.send("initialize", protocol=1, **settings))
        usual, low = own_priority(server), max(NICENESS, own_priority(server)) if asked else own_priority(server)
        model = {key: training[key] for key in ("model", "device")}
        server.call("generate", prompt="a boat", max_new_tokens=2, **model)
        assert {*priorities(server.worker()).values()} == {usual}
        server.start_job("a", params=training | {"name": "mine"})
        server.event("a", lambda event: event["event"] == "step")
        wait_until(lambda: session_is(server.worker(), NICENESS if asked else 0))
        found = priorities(server.worker())
        assert found.pop(server.worker()) == usual
        assert low in found.values()
        assert "text" in server.call("generate", prompt="a boat", max_new_tokens=2, **model)
        wait_until(lambda: session_is(server.worker(), 0))
        server.call("jobs.cancel", expected_job_id="a")
        server.state("a", {"interrupted"})
        assert priorities(server.worker())[server.worker()] == usual
