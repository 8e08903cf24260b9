"""Pause, kill and resume: on the CPU, a training that goes on ends, bit for bit, as one without interruption."""

import gc
import json
import shutil
import signal
import weakref
from dataclasses import asdict

import pytest
from builders import make_sentences
from command import start
from paused_jobs import RECIPE, THIRD_STEP, at_step, bits, personalizer, resume, verdict

from sebp_edge import AdapterStore
from sebp_edge.errors import Interrupted, MachineError, Paused
from sebp_edge.events import (
    AdapterSaved,
    Evaluated,
    ExamplesEvaluated,
    JobProgress,
    JobStarted,
    ModelLoaded,
    Notice,
    TrainingStarted,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]


def at_loss(split):
    """Whether an event is a loss on these documents after some training."""
    return lambda event, _: isinstance(event, Evaluated) and event.split == split and event.epoch > 0


def of_kind(kind, number=1):
    return lambda event, count: type(event) is kind and count == number


# By the number of notes, where their training is paused, each time that it goes on.
PLACES = {
    30: {
        "reading": of_kind(JobStarted),
        "third step": THIRD_STEP,
        "validation before": of_kind(ExamplesEvaluated),
        "within a validation": of_kind(ExamplesEvaluated, 2),
        "within the second epoch": at_step("train", 5),
        "test": at_loss("test"),
        "after the refit": at_loss("train"),
    },
    13: {
        "second fold": at_step("fold 2", 2),
        "between folds": lambda event, _: isinstance(event, TrainingStarted) and event.phase == "fold 3",
        "refit of folds": at_step("all documents", 1),
    },
}


def fractions(made):
    return [event.fraction for event in made.events if isinstance(event, JobProgress)]


@pytest.mark.parametrize("number", PLACES)
def test_a_paused_training_ends_as_one_that_was_not_paused(model, notes, whole, tmp_path, number):
    store, job, told = AdapterStore(tmp_path / "store"), None, []
    for place, at in PLACES[number].items():
        paused = personalizer(**(job.arguments() if job else {"model": model}), store=store, at=at)
        with pytest.raises(Paused) as error:
            paused.resume(job.id) if job else paused.adapt(notes[number], activate_anyway=True)
        assert paused.in_use.base is None
        assert store.names() == []
        job = store.jobs.get()
        assert (job.id, job.state) == (error.value.job, "paused"), place
        told += fractions(paused)
        assert not told or round(job.progress, 4) == told[-1], place
    resumed = personalizer(**job.arguments(), store=store)
    result = resumed.resume()
    told += fractions(resumed)
    assert told == sorted(told) and told[-1] == 1  # from each pause, progress goes on
    assert (bits(store), verdict(result)) == whole[number][:2]
    assert result.curves == whole[number][2]
    assert store.jobs.list() == []
    assert not any(job.folder.parent.iterdir())


def test_a_pause_while_the_adapter_is_assessed_returns_the_result(model, notes, whole, tmp_path, monkeypatch):
    """The version is saved and active by then, and the job is over."""
    store, seen = AdapterStore(tmp_path / "store"), []

    def assess(base, beginnings, check, decoder):
        seen.append((store.adapter("default").active(), store.jobs.list()))
        assert len(seen) == 1 and paused.pause()
        check()

    monkeypatch.setattr("sebp_edge.run.assessment.continue_each", assess)
    paused = personalizer(model, store)
    result = paused.adapt(notes[30], activate_anyway=True)
    assert seen == [(1, [])]
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert (result.general_loss_after, result.copies, result.samples, result.warnings) == (None, None, (), ())
    assert store.adapter("default").report().training.copies is None


def test_a_pause_frees_the_model_although_its_error_is_kept(model, notes, tmp_path):
    alive = []

    def at(event, _):
        if isinstance(event, ModelLoaded):
            alive.append(weakref.ref(made.in_use.base.model))
        return THIRD_STEP(event, _)

    made = personalizer(model, tmp_path / "store", at)
    try:
        made.adapt(notes[30])
    except Paused as error:
        kept = error
    assert kept.job
    gc.collect()
    assert [model() for model in alive] == [None]


def test_a_pause_while_the_adapter_is_saved_comes_too_late(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, lambda event, _: isinstance(event, AdapterSaved) and made.pause())
    assert made.adapt(notes[30], activate_anyway=True).version == 1
    assert store.jobs.list() == []
    assert not made.pause()


def test_what_learns_on_goes_on_too(model, tmp_path, notes, whole):
    store = AdapterStore(shutil.copytree(whole[30][4], tmp_path / "store"))
    folder = shutil.copytree(notes[30], tmp_path / "texts")
    for number, text in enumerate(make_sentences(40)[30:]):
        (folder / f"new-{number}.md").write_text(text)
    other = AdapterStore(shutil.copytree(tmp_path / "store", tmp_path / "other"))
    expected = personalizer(model, other).adapt(folder, activate_anyway=True)
    assert expected.learnt_on_from == 1
    with pytest.raises(Paused):
        personalizer(model, store, at_step("train", 1)).adapt(folder, activate_anyway=True)
    _, result = resume(store)
    assert (bits(store, 2), verdict(result)) == (bits(other, 2), verdict(expected))
    assert (result.learnt_on_from, result.gain_over_active) == (1, expected.gain_over_active)
    found, wanted = (json.loads((each.adapter_path / "documents.json").read_text()) for each in (result, expected))
    assert found["salt"] == wanted["salt"]
    assert [each["hash"] for each in found["documents"]] == [each["hash"] for each in wanted["documents"]]


def test_a_training_of_forget_goes_on_and_the_documents_are_forgotten_then(model, tmp_path, whole):
    store, other = (AdapterStore(shutil.copytree(whole[30][4], tmp_path / name)) for name in ("store", "other"))
    expected = personalizer(model, other).forget("note-03.md", activate_anyway=True)
    with pytest.raises(Paused):
        personalizer(model, store, at_step("train", 2)).forget("note-03.md", activate_anyway=True)
    assert store.adapter("default").versions() == [1]
    assert store.jobs.get().record.kind == "forget"
    _, receipt = resume(store)
    assert receipt.documents == expected.documents
    assert bits(store, 2) == bits(other, 2)
    assert (store.adapter("default").versions(), store.jobs.list()) == ([2], [])


@pytest.mark.usefixtures("saves_each_step")
def test_a_stop_saves_the_best_state_and_the_job_can_go_on(model, notes, tmp_path, whole):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, lambda event, _: at_step("train", 5)(event, _) and (made.stop() or True))
    with pytest.raises(
        Interrupted, match=r"activate\(1\); to go on with the training: personalizer\.resume\('"
    ) as error:
        made.adapt(notes[30], activate_anyway=True)
    assert error.value.version == 1
    assert store.jobs.get().state == "interrupted"
    _, result = resume(store)
    assert (result.version, bits(store, 2), verdict(result)) == (2, whole[30][0], whole[30][1])


def test_a_full_disk_does_not_end_the_training_nor_pauses_it(model, notes, tmp_path, whole, full_disk):
    full_disk()
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, THIRD_STEP)
    result = made.adapt(notes[30], activate_anyway=True)
    assert (bits(store), verdict(result)) == whole[30][:2]
    (notice,) = (event.message for event in made.events if isinstance(event, Notice) and "checkpoint" in event.message)
    assert notice.endswith("No space left on device. The training is not paused, and goes on.")


# Kills a training before one of the calls that write its files, or right after a step.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from sebp_edge import Personalizer, Recipe
from sebp_edge.events import StepDone
from sebp_edge.engine.training import checkpoint
model, store, notes, kind, number, recipe = sys.argv[1:]
checkpoint.SHARE = 1e9
count = 0
def die(*_):
    global count
    count += 1
    if count == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
def before(module, name):
    original = getattr(module, name)
    def call(*arguments, **options):
        die()
        return original(*arguments, **options)
    setattr(module, name, call)
if kind == "tensors":
    before(checkpoint, "write_tensors")
elif kind == "manifest":
    before(checkpoint, "write_checked_json")
sink = (lambda event: isinstance(event, StepDone) and die()) if kind == "step" else (lambda event: None)
recipe = Recipe(**json.loads(recipe))
made = Personalizer(model, store=store, recipe=recipe, device="cpu", on_event=sink)
made.adapt(Path(notes), activate_anyway=True)
"""


@pytest.mark.parametrize(("kind", "number"), [("step", 3), ("tensors", 7), ("manifest", 9)])
def test_a_killed_training_goes_on_from_its_last_checkpoint(model, notes, whole, tmp_path, kind, number):
    recipe = json.dumps(asdict(RECIPE))
    with start([KILLED, model, tmp_path / "store", notes[30], kind, number, recipe], stderr=None) as killed:
        assert killed.wait(120) == -signal.SIGKILL
    store = AdapterStore(tmp_path / "store")
    (job,) = store.jobs.list()
    assert (job.state, job.has_checkpoint, store.names()) == ("interrupted", True, [])
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert store.jobs.list() == []


def test_less_memory_than_the_plan_takes_is_refused(pause):
    store, job, _ = pause(memory_budget="30GB")
    made = personalizer(**job.arguments() | {"memory_budget": "1MB"}, store=store)
    with pytest.raises(MachineError, match=r"The training began with a plan for .* and the memory budget is .* now"):
        made.resume()
    assert store.jobs.get().state == "paused"
