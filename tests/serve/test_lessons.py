"""A lesson: what a warm server learns on is active once it is judged, and assessed afterwards."""

import os
import signal

import pytest
from builders import make_sentences
from command import RECIPE
from served import Server

from sebp_edge import AdapterStore

pytest.importorskip("resource", reason="needs a Unix")
pytestmark = pytest.mark.slow
PARTS = ["samples", "general text", "copies"]


@pytest.fixture
def server(settings, notes_folder, training, tmp_path):
    """A server with a warm worker, and an active version of an adapter."""
    (tmp_path / "short.toml").write_text(RECIPE)
    params = training | {"name": "mine", "recipe": str(tmp_path / "short.toml"), "activate_anyway": True}
    with Server(warm=True) as server:
        server.initialize(**settings)
        server.start_job("first", params=params)
        assert server.state("first")["state"] == "done"
        (notes_folder / "new.md").write_text(make_sentences(1, seed=7)[0])
        yield server


@pytest.fixture
def lesson(server, training, tmp_path):
    """What it takes to learn the new note."""
    return {"params": training | {"name": "mine", "recipe": str(tmp_path / "short.toml"), "activate_anyway": True}}


def adapter(settings):
    return AdapterStore(settings["store"]).adapter("mine")


def is_saved(event):
    return event["event"] == "saved"


def test_it_is_active_before_it_is_assessed_and_answers(server, settings, lesson, model_folder):
    server.start_job("lesson", **lesson)
    saved = server.event("lesson", is_saved)
    assert (saved["event"]["version"], saved["event"]["active"], saved["phase"]) == (2, True, "saving")
    assert adapter(settings).active() == 2
    state = server.state("lesson")
    assert (state["state"], state["result"]["version"], state["result"]["learnt_on_from"]) == ("done", 2, 1)
    assert state["result"]["general_loss_after"] and list(state["result"]["phases"])[-3:] == PARTS
    report = adapter(settings).report(2)
    assert report.record.general_loss_after == state["result"]["general_loss_after"]
    assert report.training.copies is not None
    chosen = {"model": str(model_folder), "device": "cpu", "max_new_tokens": 2}
    assert server.call("generate", prompt="the", adapter="mine", **chosen)["text"]


def test_a_refused_one_leaves_the_active_version_and_a_kept_one_is_rolled_back(server, settings, lesson, tmp_path):
    (tmp_path / "short.toml").write_text(RECIPE + "margin = 0.99\n")
    server.start_job("lesson", params=lesson["params"] | {"activate_anyway": False})
    assert not server.event("lesson", is_saved)["event"]["active"]
    result = server.state("lesson")["result"]
    assert (result["verdict"], result["version"], result["active"]) == ("no gain", 2, False)
    assert (adapter(settings).versions(), adapter(settings).active()) == ([1, 2], 1)
    server.call("adapters.activate", name="mine", version=2)
    assert adapter(settings).active() == 2
    server.call("adapters.rollback", name="mine")
    assert adapter(settings).active() == 1


@pytest.mark.parametrize("when", ["step", "saved"])
def test_a_worker_that_is_killed_loses_nothing(server, settings, lesson, when):
    """Before it is saved, the job goes on; afterwards, only the assessment is missing."""
    with server.held("lesson", when, **lesson):
        os.kill(server.worker(), signal.SIGKILL)
    ended = server.state("lesson")
    assert (ended["state"], ended["error"]["code"], ended["error"]["retry"]) == ("interrupted", "worker_ended", True)
    found, was_saved = adapter(settings), when == "saved"
    assert server.call("jobs.get", id="lesson")["job"]["resumable"] is not was_saved
    assert found.active() == 1 + was_saved
    if not was_saved:
        server.call("jobs.resume", id="lesson")
        assert server.state("lesson")["state"] == "done"
    assert found.active() == 2
    record = found.open(2).record
    assert (record.learnt_on_from, record.trained_on_all) == (1, True)
    assert (record.general_loss_after is None) == was_saved
    assert not list((AdapterStore(settings["store"]).folder / ".jobs").iterdir())


def test_a_pause_while_it_is_assessed_ends_it(server, settings, lesson):
    with server.held("lesson", "saved", **lesson):
        server.call("jobs.pause", expected_job_id="lesson")
    assert server.state("lesson")["state"] == "done"
    assert adapter(settings).active() == 2
