"""Trainings that wait for mains power and memory, which changes no bit."""

import gc
import json
import random
import signal
import sys
import weakref

import psutil
import pytest
from command import RECIPE, process, records, run, start
from fake_machine import write_supplies
from paused_jobs import bits

from sebp_edge import AdapterStore, Politeness
from sebp_edge.errors import Interrupted, Paused
from sebp_edge.events import ExamplesEvaluated, JobProgress, JobStarted, ModelLoaded, StepDone, Waiting

pytestmark = pytest.mark.usefixtures("unassessed")
GB = 10**9


@pytest.fixture
def hold(monkeypatch):
    """A function that sets whether a wait frees the memory of the model at once, or never."""
    return lambda *, frees: monkeypatch.setattr("sebp_edge.run.giving_way.HELD_SECONDS", 0.0 if frees else 1e9)


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


PLACES = {
    "when the model is loaded": lambda event, steps: isinstance(event, ModelLoaded),
    "within an evaluation": lambda event, steps: isinstance(event, ExamplesEvaluated),
    "at a step": lambda event, steps: isinstance(event, StepDone) and len(steps) == 3,
    "in the last training": lambda event, steps: isinstance(event, StepDone) and event.phase == "all documents",
}


@pytest.mark.slow
@pytest.mark.parametrize(("places", "frees"), [(PLACES, True), (["within an evaluation"], False)])
def test_waiting_changes_no_bit(polite, mains, hold, notes_folder, store_of_notes, places, frees):
    """A training waits at each of the places, once."""
    hold(frees=frees)
    left, models = [*places], []

    def react(made, event):
        if isinstance(event, ModelLoaded):
            models.append(weakref.ref(made.in_use.base.model))
        steps = of_kind(made.events, StepDone)
        if mains.power_plugged and (here := [place for place in left if PLACES[place](event, steps)]):
            left.remove(here[0])
            mains.power_plugged = False
        if isinstance(event, Waiting):
            if frees:
                gc.collect()
                assert [model() for model in models] == [None] * len(models)
            mains.power_plugged = True

    made = polite(react)
    result = made.adapt(notes_folder)
    assert result.active
    assert bits(made.store) == bits(store_of_notes)
    waited = [(waiting.waits_for, waiting.holds_memory) for waiting in of_kind(made.events, Waiting)]
    assert waited == [("power", not frees)] * len(places)
    assert len(of_kind(made.events, JobStarted)) == 1 + frees * len(places)
    assert made.store.jobs.list() == []
    fractions = [event.fraction for event in of_kind(made.events, JobProgress)]
    assert fractions == sorted(fractions) and fractions[-1] == 1


@pytest.mark.slow
def test_on_battery_nothing_is_loaded_before_it_begins(polite, mains, notes_folder):
    mains.power_plugged = False

    def react(made, event):
        if isinstance(event, Waiting):
            assert not of_kind(made.events, ModelLoaded)
            mains.power_plugged = True

    made = polite(react)
    made.adapt(notes_folder)
    kinds = [type(event) for event in made.events]
    assert kinds.index(JobStarted) < kinds.index(Waiting) < kinds.index(ModelLoaded)
    assert made.events[kinds.index(Waiting) + 1].phase == "waiting"


@pytest.mark.slow
def test_without_politeness_nothing_is_looked_at(polite, mains, notes_folder):
    mains.power_plugged = False
    made = polite(politeness=None)
    assert made.adapt(notes_folder).active
    assert of_kind(made.events, Waiting) == []
    assert polite().generate("a boat", max_new_tokens=1) is not None  # only trainings wait


@pytest.mark.slow
@pytest.mark.parametrize("frees", [False, True], ids=["holds", "frees"])
def test_a_training_that_waits_can_be_paused_and_stopped(polite, mains, hold, notes_folder, store_of_notes, frees):
    hold(frees=frees)
    asks = []

    def react(made, event):
        if isinstance(event, StepDone) and len(asks) < 2:
            mains.power_plugged = False
        if isinstance(event, Waiting):
            asks.append(event)
            if len(asks) == 1:
                assert made.pause()
            else:
                made.stop()

    with pytest.raises(Paused) as paused:
        polite(react).adapt(notes_folder)
    mains.power_plugged = True
    made = polite(react)
    with pytest.raises(Interrupted, match=paused.value.job):
        made.resume(paused.value.job)
    mains.power_plugged = True
    made = polite()
    made.resume(paused.value.job)
    active = made.store.adapter("default").active()
    assert active is not None
    if active == 1:  # a stop that held the model saved its best state as version 1
        assert bits(made.store) == bits(store_of_notes)


@pytest.mark.slow
def test_others_that_need_memory_get_the_model_s_at_once(polite, mains, machine, notes_folder, store_of_notes):
    machine.has_memory(50 * GB, 64 * GB)
    models = []

    def react(made, event):
        if isinstance(event, ModelLoaded):
            models.append(weakref.ref(made.in_use.base.model))
        if isinstance(event, StepDone) and len(of_kind(made.events, StepDone)) == 2:
            machine.has_memory(GB, 64 * GB)
        if isinstance(event, Waiting):
            gc.collect()
            assert [model() for model in models] == [None]
            machine.has_memory(50 * GB, 64 * GB)

    made = polite(react)
    made.adapt(notes_folder)
    (waiting,) = of_kind(made.events, Waiting)
    assert (waiting.waits_for, waiting.holds_memory) == ("memory", False)
    assert "GB more must be free" in waiting.message
    assert bits(made.store) == bits(store_of_notes)


@pytest.mark.slow
def test_a_full_disk_keeps_the_model_in_memory(polite, mains, hold, notes_folder, full_disk, store_of_notes):
    """What is not saved would be lost with the memory."""
    hold(frees=True)

    def react(made, event):
        if isinstance(event, StepDone) and len(of_kind(made.events, StepDone)) == 3:
            full_disk()
            mains.power_plugged = False
        if isinstance(event, Waiting):
            mains.power_plugged = True

    made = polite(react)
    made.adapt(notes_folder)
    assert [event.holds_memory for event in of_kind(made.events, Waiting)] == [True]
    assert bits(made.store) == bits(store_of_notes)


@pytest.mark.slow
def test_an_adapter_that_is_saved_elsewhere_waits_in_memory(polite, mains, hold, notes_folder, tmp_path, machine):
    hold(frees=True)
    machine.has_memory(GB // 2, 64 * GB)  # which it could not free

    def react(made, event):
        if isinstance(event, StepDone) and event.step == 2:
            mains.power_plugged = False
        if isinstance(event, Waiting):
            mains.power_plugged = True

    made = polite(react)
    made.adapt(notes_folder, out=tmp_path / "out")
    assert {(event.waits_for, event.holds_memory) for event in of_kind(made.events, Waiting)} == {("power", True)}


def test_a_job_remembers_its_politeness(polite, notes_folder):
    def react(made, event):
        if isinstance(event, StepDone):
            assert made.pause()

    asked = Politeness(threads=random.randint(1, 3), waits=True)
    made = polite(react, politeness=asked)
    with pytest.raises(Paused) as paused:
        made.adapt(notes_folder)
    assert AdapterStore(made.store.folder.parent).jobs.get(paused.value.job).arguments()["politeness"] == asked


# ------------------------------------------------------------------------------------------------------------- process

# A command on a machine whose power supplies are described in the folder that is the first argument.
ON_BATTERY = """
import sys
import psutil._pslinux
psutil._pslinux.POWER_SUPPLY_PATH = sys.argv.pop(1)
from sebp_edge.run import giving_way
giving_way.LOOK_SECONDS = 0.05
giving_way.HELD_SECONDS = 0.0
from sebp_edge.cli import main
main()
"""


def until(one, wanted):
    """Returns the first message of a process that is wanted."""
    for line in one.stdout:
        if wanted(message := json.loads(line)):
            return message
    raise EOFError(one.stderr.read())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /sys")
def test_the_command_waits_on_battery_and_can_be_interrupted_then(adapt, recipe, tmp_path, own_data_folder):
    recipe.write_text(RECIPE.replace("epochs = 1", "epochs = 30"))
    write_supplies(tmp_path / "power", plugged=True)
    command = [ON_BATTERY, tmp_path / "power", *adapt, "--polite", "--json"]
    with start(command) as one:
        until(one, lambda message: message["event"] == "training_started")
        write_supplies(tmp_path / "power", plugged=False)
        waiting = until(one, lambda message: message["event"] == "waiting")
        assert (waiting["waits_for"], waiting["holds_memory"]) == ("power", False)
        assert until(one, lambda message: True)["phase"] == "waiting"
        assert psutil.Process(one.pid).nice() >= 10
        one.send_signal(signal.SIGTERM)
        *_, error = records(one.communicate(timeout=100)[0])
    assert (one.returncode, error["code"]) == (130, "interrupted")
    (job,) = AdapterStore().jobs.list()
    assert "To go on" in error["message"] and job.id in error["message"]
    write_supplies(tmp_path / "power", plugged=True)
    with process("adapt", "--resume", job.id, "--json") as one:  # which gets a low priority, too
        *_, result = records(one.communicate(timeout=200)[0])
    assert result["event"] == "result"


def test_the_options_are_refused_in_one_sentence(adapt):
    for options in (["--threads", "0"], ["--gpu-share", "200"], ["--gpu-share", "50", "--device", "cpu"]):
        found = run(*adapt, *options, "--json")
        (*_, error) = records(found.stdout)
        assert (found.exit_code, error["code"]) == (2, "invalid_option")
        assert error["message"].endswith(".")
