"""Pause, kill and resume: on the CPU, a training that goes on ends, bit for bit, as one without interruption."""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import weakref
from dataclasses import asdict

import pytest
from builders import make_llama, make_sentences
from command import assert_one_sentence, records, run, start
from failing_memory import RECIPE as SMALL
from quick import skip_assessment

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.adapters.history import read_history
from sebp_edge.errors import AdapterError, Interrupted, JobError, MachineError, OptionError, Paused, TextsChanged
from sebp_edge.events import (
    AdapterSaved,
    Evaluated,
    ExamplesEvaluated,
    JobStarted,
    ModelLoaded,
    Notice,
    StepDone,
    TextsRead,
    TrainingStarted,
)
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.sparse.patches.stops import _Checked
from sebp_edge.texts.split_history import take_fingerprints
from sebp_edge.training.recovery import RecoveringLearner

pytestmark = pytest.mark.usefixtures("unassessed")
RECIPE = SMALL.replace(learning_rate=2e-2, epochs=2, batch_tokens=200)


@pytest.fixture(scope="session")
def model(tmp_path_factory, tokenizer):
    """A model with random weights so large that a few steps lower its loss by a tenth."""
    folder = tmp_path_factory.mktemp("models") / "large-weights"
    make_llama(initializer_range=0.1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"note-{number:02}.md").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def notes(tmp_path_factory):
    """Folders of notes by their number: of 30 one part is for tests, 13 are trained on in folds."""
    root = tmp_path_factory.mktemp("notes")
    return {number: write(root / str(number), make_sentences(40)[:number]) for number in (13, 30)}


def personalizer(model, store, at=None, **options):
    """Makes a Personalizer that pauses itself at the event for which `at(event, number of its kind)` is true."""
    made = None

    def sink(event):
        made.events.append(event)
        number = sum(type(each) is type(event) for each in made.events)
        if at is not None and at(event, number):
            assert made.pause()

    options = {"recipe": RECIPE, "device": "cpu", "on_event": sink} | options
    made = Personalizer(model, store=store, **options)
    made.events = []
    return made


def bits(store, version=1, name="default"):
    """The bits of a version's weights, by their files; the order of a header's metadata is random."""
    folder = store.adapter(name).version_folder(version)
    return {str(path.relative_to(folder)): _tensors(path.read_bytes()) for path in folder.rglob("*.safetensors")}


def _tensors(content):
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return header, hashlib.sha256(content[end:]).hexdigest()


def verdict(result):
    return result.verdict, result.heldout_loss_before, result.heldout_loss_after, result.gain_at_least


@pytest.fixture(scope="session")
def whole(model, notes, tmp_path_factory):
    """What uninterrupted trainings on folders of notes are, by the folder."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        for number, folder in notes.items():
            made = personalizer(model, tmp_path_factory.mktemp("whole") / "store")
            result = made.adapt(folder, activate_anyway=True)
            found[number] = bits(made.store), verdict(result), result.report.training.curves, made.events
    return found


def at_step(phase, step):
    return lambda event, _: isinstance(event, StepDone) and (event.phase, event.step) == (phase, step)


def at_loss(split, epoch, best=True):
    return lambda event, _: (
        isinstance(event, Evaluated) and (event.split, event.epoch, event.best) == (split, epoch, best)
    )


def of_kind(kind, number=1):
    return lambda event, count: type(event) is kind and count == number


# The number of notes, and the event.
PLACES = {
    "reading": (30, of_kind(JobStarted)),
    "model": (30, of_kind(ModelLoaded)),
    "texts": (30, of_kind(TextsRead)),
    "start": (30, of_kind(TrainingStarted)),
    "test before": (30, of_kind(ExamplesEvaluated)),
    "validation before": (30, of_kind(ExamplesEvaluated, 2)),
    "first step": (30, at_step("train", 1)),
    "within the second epoch": (30, at_step("train", 5)),
    "within a validation": (30, of_kind(ExamplesEvaluated, 3)),
    "validation": (30, at_loss("validation", 1)),
    "test": (30, at_loss("test", 2)),
    "refit": (30, at_step("all documents", 2)),
    "after the refit": (30, at_loss("train", 2)),
    "second fold": (13, at_step("fold 2", 2)),
    "between folds": (13, lambda event, _: isinstance(event, TrainingStarted) and event.phase == "fold 3"),
    "refit of folds": (13, at_step("all documents", 1)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_paused_training_ends_as_one_that_was_not_paused(model, notes, whole, tmp_path, place):
    number, at = PLACES[place]
    store = AdapterStore(tmp_path / "store")
    paused = personalizer(model, store, at)
    with pytest.raises(Paused) as error:
        paused.adapt(notes[number], activate_anyway=True)
    assert paused.in_use.base is None
    assert store.names() == []
    job = store.jobs.get()
    assert (job.id, job.state) == (error.value.job, "paused")
    resumed = personalizer(**job.arguments(), store=store)
    result = resumed.resume()
    assert (bits(store), verdict(result)) == whole[number][:2]
    assert result.report.training.curves == whole[number][2]
    assert store.jobs.list() == []
    assert not any(job.folder.parent.iterdir())


@pytest.mark.parametrize("method", ["__call__", "_check_backward"])
def test_a_pause_within_a_micro_batch_discards_it_and_waits_for_one_layer_at_most(
    model, notes, whole, tmp_path, monkeypatch, method
):
    store, run, layers = AdapterStore(tmp_path / "store"), getattr(_Checked, method), []

    def pausing(checked, *given, **options):
        layers.append(any(isinstance(event, StepDone) for event in paused.events))
        if layers.count(True) == 3:
            assert paused.pause()
        return run(checked, *given, **options)

    paused = personalizer(model, store)
    with monkeypatch.context() as patch:
        patch.setattr(_Checked, method, pausing)
        with pytest.raises(Paused):
            paused.adapt(notes[30], activate_anyway=True)
    assert layers.count(True) == 3
    assert sum(isinstance(event, StepDone) for event in paused.events) == 1
    resumed = personalizer(**store.jobs.get().arguments(), store=store)
    result = resumed.resume()
    assert (bits(store), verdict(result), result.report.training.curves) == whole[30][:3]


THIRD_STEP = at_step("train", 3)


@pytest.fixture
def pause(model, notes, tmp_path):
    """A function that pauses a training on 30 notes of its own; returns its store, its job and its folder."""

    def paused(at=THIRD_STEP, **options):
        folder = shutil.copytree(notes[30], tmp_path / "notes", dirs_exist_ok=True)
        store = AdapterStore(tmp_path / "store")
        with pytest.raises(Paused):
            personalizer(model, store, at, **options).adapt(folder, activate_anyway=True)
        return store, store.jobs.list()[-1], folder

    return paused


def resume(store, job=None, **options):
    made = personalizer(**store.jobs.get(job).arguments(), store=store)
    return made, made.resume(job, **options)


def test_a_pause_while_the_adapter_is_assessed_repeats_the_assessment_only(model, notes, whole, tmp_path, monkeypatch):
    store, seen = AdapterStore(tmp_path / "store"), []

    def assess(base, beginnings, check):
        seen.append(len(beginnings))
        if len(seen) == 2:
            assert paused.pause()
        check()
        return [""] * len(beginnings)

    monkeypatch.setattr("sebp_edge.run.assessment.continue_each", assess)
    paused = personalizer(model, store)
    with pytest.raises(Paused, match="Paused at 100 %"):
        paused.adapt(notes[30], activate_anyway=True)
    resumed, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert not any(isinstance(event, StepDone) for event in resumed.events)


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


def test_a_pause_within_a_long_step_repeats_that_step(model, notes, tmp_path, monkeypatch):
    monkeypatch.setattr("sebp_edge.run.preparation.FASTEST", MemoryOptions(max_rows=64))
    compute, calls, found = RecoveringLearner.accumulate, [], []

    def accumulate(learner, micro_batch, loss_tokens):
        compute(learner, micro_batch, loss_tokens)
        calls.append(len(learner.schedule.epochs[0][1].micro_batches))
        if len(found) == 1 and len(calls) == len(learner.schedule.epochs[0][0].micro_batches) + 2:
            assert made.pause()

    monkeypatch.setattr(RecoveringLearner, "accumulate", accumulate)
    for number in range(2):
        store = AdapterStore(tmp_path / f"store-{number}")
        calls.clear()
        made = personalizer(model, store)
        if number:
            with pytest.raises(Paused):
                made.adapt(notes[30], activate_anyway=True)
            assert [event.step for event in made.events if isinstance(event, StepDone)] == [1]
            assert calls[-1] > 2
            found.append(None)
            _, result = resume(store)
        else:
            result = made.adapt(notes[30], activate_anyway=True)
        found.append((bits(store), verdict(result)))
    assert found[0] == found[2]


def test_a_pause_while_the_adapter_is_saved_comes_too_late(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, lambda event, _: isinstance(event, AdapterSaved) and made.pause())
    assert made.adapt(notes[30], activate_anyway=True).version == 1
    assert store.jobs.list() == []
    assert not made.pause()


def test_a_training_can_be_paused_again_and_again(pause, whole):
    store, job, _ = pause()
    for step in (4, 5):
        made = personalizer(**job.arguments(), at=at_step("train", step), store=store)
        with pytest.raises(Paused) as error:
            made.resume(job.id)
        assert error.value.job == job.id
        assert [event.step for event in made.events if isinstance(event, StepDone)] == [step]
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_what_learns_on_goes_on_too(model, tmp_path, notes):
    store = AdapterStore(tmp_path / "store")
    folder = write(tmp_path / "texts", make_sentences(40)[:30])
    personalizer(model, store).adapt(folder, activate_anyway=True)
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
    found, wanted = (read_history(each.adapter_path) for each in (result, expected))
    assert (found.salt, [each.key for each in found.documents]) == (
        wanted.salt,
        [each.key for each in wanted.documents],
    )


def test_a_training_of_forget_goes_on_and_the_documents_are_forgotten_then(model, tmp_path, notes):
    store = AdapterStore(tmp_path / "store")
    personalizer(model, store).adapt(notes[30], activate_anyway=True)
    other = AdapterStore(shutil.copytree(tmp_path / "store", tmp_path / "other"))
    expected = personalizer(model, other).forget("note-03.md", activate_anyway=True)
    with pytest.raises(Paused):
        personalizer(model, store, at_step("train", 2)).forget("note-03.md", activate_anyway=True)
    assert store.adapter("default").versions() == [1]
    assert store.jobs.get().record.kind == "forget"
    _, receipt = resume(store)
    assert receipt.documents == expected.documents
    assert bits(store, 2) == bits(other, 2)
    assert (store.adapter("default").versions(), store.jobs.list()) == ([2], [])


RECIPES = {
    "8-bit moments": {},
    "all weights": {"method": "full", "learning_rate": 1e-3},
    "updated in the backward pass": {"method": "full", "learning_rate": 1e-3},
    "pruned": {"method": "full", "learning_rate": 1e-3, "sparsity": {"pattern": "2:4", "dense": 0.2, "decay": 0.4}},
}


@pytest.mark.parametrize("kind", RECIPES)
def test_every_kind_of_training_goes_on_bit_for_bit(model, notes, tmp_path, monkeypatch, request, kind):
    recipe, found = RECIPE.replace(epochs=3, **RECIPES[kind]), []
    if kind == "8-bit moments":
        monkeypatch.setattr("sebp_edge.run.preparation.FASTEST", MemoryOptions(moments_in_8_bits=True))
    if kind == "updated in the backward pass":
        request.getfixturevalue("updated_in_backward")
    for at in (None, at_step("train", 5)):
        store = AdapterStore(tmp_path / f"store-{at is None}")
        made = personalizer(model, store, at, recipe=recipe)
        if at is None:
            result = made.adapt(notes[30], activate_anyway=True)
        else:
            with pytest.raises(Paused):
                made.adapt(notes[30], activate_anyway=True)
            _, result = resume(store)
        found.append((bits(store), verdict(result), result.report.training.curves))
    assert found[0] == found[1]


def checkpoint_of(job):
    return json.loads((job.folder / "checkpoint.json").read_text())


@pytest.mark.parametrize("damage", ["cut", "flipped", "manifest", "missing"])
def test_a_damaged_checkpoint_is_refused_in_one_sentence_or_starts_over(pause, whole, damage):
    store, job, _ = pause()
    file = job.folder / checkpoint_of(job)["files"]["learner"]["file"]
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        place = random.Random().randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif damage == "manifest":
        (job.folder / "checkpoint.json").write_text('{"format": 1')
    else:
        file.unlink()
    with pytest.raises(JobError, match=r"is damaged, or was written by another sebp-edge; start over with"):
        resume(store)
    assert store.jobs.get().state == "paused"
    _, result = resume(store, changed="again")
    assert verdict(result) == whole[30][1]


def test_what_a_kill_leaves_half_written_is_never_taken(pause, whole):
    store, job, _ = pause()
    (job.folder / ".checkpoint.json-x").write_text('{"format": 1, "files": {}}')
    (job.folder / "99.safetensors").write_bytes(b"half")
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert not any(job.folder.parent.iterdir())


def test_changed_documents_are_refused_and_named_on_the_screen_only(pause):
    store, _, folder = pause()
    (folder / "note-05.md").write_text("Something else stands here now, in other words.")
    (folder / "note-07.md").unlink()
    with pytest.raises(TextsChanged) as error:
        resume(store)
    assert (error.value.changed, error.value.missing) == (("note-05.md",), 2)
    assert "Of the 30 documents that the training knows, 2 are not there as they were." in str(error.value)
    assert "New or changed is 'note-05.md'" in str(error.value)
    assert store.jobs.get().state == "paused"


def test_changed_documents_can_be_left_out_and_stay_known(pause):
    store, job, folder = pause()
    keys = {document.key for document in read_history(job.folder).known}
    (folder / "note-05.md").write_text("Something else stands here now, in other words.")
    made, result = resume(store, changed="without")
    assert any("goes on without 1 document" in getattr(event, "message", "") for event in made.events)
    assert any("1 document that came since is left" in getattr(event, "message", "") for event in made.events)
    assert next(event.step for event in made.events if isinstance(event, StepDone)) == 4
    assert result.documents == 29
    known = read_history(result.adapter_path).known
    assert {document.key for document in known} == keys
    assert sum(document.absent for document in known) == 1
    # So that it can be forgotten.
    (gone,) = (f"{document.key:016x}" for document in known if document.absent)
    receipt = personalizer(**job.arguments(), store=store).forget(gone, activate_anyway=True)
    assert receipt.documents == (gone,)


def test_what_goes_on_without_documents_can_be_paused_again(pause):
    store, job, folder = pause()
    (folder / "note-05.md").unlink()
    made = personalizer(**job.arguments(), at=at_step("train", 4), store=store)
    with pytest.raises(Paused):
        made.resume(changed="without")
    _, result = resume(store)
    assert result.documents == 29
    assert result.heldout_loss_before is not None


def test_a_split_without_documents_starts_over_or_is_refused(pause):
    store, job, folder = pause()
    history, texts = read_history(job.folder), {path: path.read_text() for path in folder.iterdir()}
    validated = {document.key for document in history.known if document.role == "validation"}
    for path, fingerprint in take_fingerprints(texts, history.salt).items():
        if fingerprint.key in validated:
            path.unlink()
    with pytest.raises(JobError, match="none is left in the split 'validation'"):
        resume(store, changed="without")
    _, result = resume(store, changed="again")
    assert result.documents == 30 - len(validated)


def test_new_documents_are_left_for_the_next_time(pause, whole):
    store, _, folder = pause()
    (folder / "a-new-one.md").write_text("This note was not there when the training began.")
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_another_model_or_device_or_version_is_refused(pause, notes, tmp_path, monkeypatch, tokenizer):
    store, job, _ = pause()
    other = tmp_path / "other-model"
    make_llama(seed=7).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(OptionError, match=r"was begun with the model '.*', and this Personalizer has '.*other-model'"):
        personalizer(other, store).resume()
    for path in other.iterdir():
        shutil.copy(path, job.record.settings["model"])
    try:
        with pytest.raises(JobError, match="The base model has other weights"):
            resume(store)
    finally:
        make_llama(initializer_range=0.1).save_pretrained(job.record.settings["model"])
    monkeypatch.setattr("sebp_edge.run.work.__version__", "9.9.9")
    with pytest.raises(JobError, match=r"was begun by sebp-edge 0\.1\.0, and this is 9\.9\.9; start over"):
        resume(store)


def test_the_recipe_and_the_seed_are_the_jobs(pause, whole, model):
    store, _, _ = pause()
    result = personalizer(model, store, recipe="notes", seed=7).resume()
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_a_newer_version_ends_a_job(pause, notes):
    store, job, _ = pause()
    made = personalizer(**job.arguments(), store=store)
    made.adapt(notes[13], activate_anyway=True)
    assert any("is paused at" in getattr(event, "message", "") for event in made.events)
    assert store.jobs.list() == []


def test_two_processes_do_not_go_on_with_the_same_job(pause):
    store, job, _ = pause()
    with job.held(), pytest.raises(JobError, match="is running in another process"):
        resume(store, job.id)
    assert store.jobs.get(job.id).state in ("interrupted", "paused")


def test_texts_that_are_no_files_are_given_again(model, tmp_path, whole, notes):
    store, texts = AdapterStore(tmp_path / "store"), make_sentences(40)[:30]
    with pytest.raises(Paused):
        personalizer(model, store, THIRD_STEP).adapt(texts, activate_anyway=True)
    with pytest.raises(JobError, match="texts that are no files"):
        resume(store)
    _, result = resume(store, texts=texts)
    assert verdict(result) == whole[30][1]


def test_a_stop_saves_the_best_state_and_the_job_can_go_on(model, notes, tmp_path, whole, monkeypatch):
    monkeypatch.setattr("sebp_edge.training.checkpoint.SHARE", 1e9)
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, lambda event, _: THIRD_STEP(event, _) and (made.stop() or True))
    with pytest.raises(
        Interrupted, match=r"activate\(1\); to go on with the training: personalizer\.resume\('"
    ) as error:
        made.adapt(notes[30], activate_anyway=True)
    assert error.value.version == 1
    assert store.jobs.get().state == "interrupted"
    _, result = resume(store)
    assert (result.version, bits(store, 2), verdict(result)) == (2, whole[30][0], whole[30][1])


def test_a_full_disk_does_not_end_the_training_nor_pauses_it(model, notes, tmp_path, whole, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sebp_edge.training.checkpoint.write_tensors", full)
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
from sebp_edge.training import checkpoint
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
    before(checkpoint, "write_atomically")
sink = (lambda event: isinstance(event, StepDone) and die()) if kind == "step" else (lambda event: None)
recipe = Recipe(**json.loads(recipe))
made = Personalizer(model, store=store, recipe=recipe, device="cpu", on_event=sink)
made.adapt(Path(notes), activate_anyway=True)
"""


@pytest.mark.parametrize(("kind", "number"), [("step", 3), ("tensors", 7), ("manifest", 9), ("step", 5)])
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


def all_bytes(folder):
    return b"".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_has_no_text_and_no_name_of_a_document(pause):
    _, job, folder = pause()
    content = all_bytes(job.folder)
    for path in folder.iterdir():
        assert path.name.encode() not in content
        for word in path.read_text().split():
            assert len(word) < 5 or word.encode() not in content.replace(str(folder).encode(), b"")
    private = (job.folder / "job.json").read_bytes()
    assert str(folder).encode() in private
    assert str(folder).encode() not in content.replace(private, b"")
    if os.name != "nt":
        assert {path.stat().st_mode & 0o077 for path in (job.folder, *job.folder.iterdir())} == {0}


@pytest.mark.parametrize("how", ["forget", "remove", "remove the version"])
def test_what_is_forgotten_or_removed_takes_its_checkpoints_along(model, notes, tmp_path, how):
    store = AdapterStore(tmp_path / "store")
    folder = shutil.copytree(notes[30], tmp_path / "notes")
    personalizer(model, store).adapt(folder, activate_anyway=True)
    (folder / "canary.md").write_text(make_sentences(60)[59])
    with pytest.raises(Paused) as error:
        personalizer(model, store, at_step("train", 1)).adapt(folder, activate_anyway=True)
    known = json.loads((store.jobs.get().folder / "known_texts.json").read_text())["texts"]
    canaries = [name.encode() for name in ("canary", error.value.job)] + [(folder / "canary.md").read_bytes()]
    adapter = store.adapter("default")
    if how == "forget":
        key = next(document.hash for document in adapter.documents(1) if document.name == "note-03.md")
        canaries += [key.encode(), next(text for text, own in known.items() if own == key).encode()]
        personalizer(model, store).forget("note-03.md", activate_anyway=True)
        # The receipt says what was forgotten.
        receipt = next(adapter.folder.glob("forgotten-*.json"))
        canaries.remove(key.encode())
        assert key in receipt.read_text()
    elif how == "remove":
        adapter.remove()
    else:
        shutil.copytree(adapter.folder / "1", adapter.folder / "2")
        adapter.remove(1)
    content = all_bytes(store.folder)
    assert [canary for canary in canaries if canary in content] == []
    assert store.jobs.list() == []


def test_a_document_that_only_a_job_knows_is_not_said_to_be_unknown(pause):
    store, job, folder = pause()
    personalizer(**job.arguments(), store=store).adapt(folder, name="other", activate_anyway=True)
    job.update(adapter="other", newest=1)
    with pytest.raises(AdapterError, match=f"may know it; to delete that: sebp-edge jobs remove {job.id}"):
        personalizer(**job.arguments(), store=store).forget("nothing.md", name="other")


def test_a_renamed_adapter_keeps_its_jobs(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    personalizer(model, store).adapt(notes[13], activate_anyway=True)
    with pytest.raises(Paused):
        personalizer(model, store, at_step("train", 1)).adapt(notes[30], activate_anyway=True)
    store.adapter("default").rename("mine")
    assert [job.record.adapter for job in store.jobs.list("mine")] == [store.jobs.get().record.adapter] == ["mine"]


def test_a_job_that_is_deleted_while_it_runs_ends_without_it(model, notes, tmp_path, whole, monkeypatch):
    monkeypatch.setattr("sebp_edge.training.checkpoint.SHARE", 1e9)
    store = AdapterStore(tmp_path / "store")

    def sink(event):
        if THIRD_STEP(event, 0):
            store.jobs.list()[0].remove()
        events.append(event)

    events, made = [], Personalizer(model, store=store, recipe=RECIPE, device="cpu", on_event=lambda event: sink(event))
    result = made.adapt(notes[30], activate_anyway=True)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert sum("can no longer be resumed" in getattr(event, "message", "") for event in events) == 1
    assert store.jobs.list() == []


def test_pause_is_refused_where_there_is_no_job(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store)
    asked = []
    made.on_event = lambda event: asked.append(made.pause())
    made.adapt(notes[30], out=tmp_path / "out")
    assert set(asked) == {False}
    assert not made.pause()
    assert store.jobs.list() == []


def test_the_plan_and_smaller_micro_batches_stay(model, notes, tmp_path, monkeypatch):
    found = []
    for number in range(2):
        store, steps = AdapterStore(tmp_path / f"store-{number}"), []

        def shortfall(_guard, steps=steps):
            steps.append(None)
            return int(len(steps) == 2)  # before the second step, for example because of other programs

        monkeypatch.setattr(MemoryGuard, "shortfall", shortfall)
        options = {"memory_budget": "30GB"}
        if number:
            with pytest.raises(Paused):
                personalizer(model, store, THIRD_STEP, **options).adapt(notes[30], activate_anyway=True)
            learner = checkpoint_of(store.jobs.get())["learner"]
            assert learner["max_rows"] < learner["prepared_rows"]
            monkeypatch.setattr(MemoryGuard, "shortfall", lambda guard: 0)
            monkeypatch.setattr("sebp_edge.run.preparation.make_plan", None)  # nothing is planned again
            _, result = resume(store)
        else:
            result = personalizer(model, store, **options).adapt(notes[30], activate_anyway=True)
        found.append((bits(store), verdict(result)))
    assert found[0] == found[1]


def test_less_memory_than_the_plan_takes_is_refused(pause):
    store, job, _ = pause(memory_budget="30GB")
    made = personalizer(**job.arguments() | {"memory_budget": "1MB"}, store=store)
    with pytest.raises(MachineError, match=r"The training began with a plan for .* and the memory budget is .* now"):
        made.resume()
    assert store.jobs.get().state == "paused"


def test_the_command_line_lists_resumes_and_removes_jobs(model, notes):
    store = AdapterStore()
    for name in ("one", "two"):
        with pytest.raises(Paused):
            personalizer(model, store, THIRD_STEP).adapt(notes[30], name=name, activate_anyway=True)
    one, two = (store.jobs.list(name)[0].id for name in ("one", "two"))
    listed = records(run("jobs", "--json").stdout)
    assert [(job["id"], job["adapter"]) for job in listed] == [(one, "one"), (two, "two")]
    assert 0 < listed[0]["progress"] < 1
    assert run("jobs").stdout.splitlines()[0].split("\t")[:4] == [one, "one", "adapt", "paused"]
    assert_one_sentence(run("adapt", "--resume"), f"2 trainings are paused or interrupted; name one of {one} ")
    assert_one_sentence(run("adapt", "--resume", "aaaaaa"), "There is no job 'aaaaaa'; ")
    refused = run("adapt", "--resume", "--epochs", "3")
    assert (refused.exit_code, "--epochs does not go with --resume" in refused.stderr) == (2, True)
    assert run("jobs", "remove", two).stdout == f"The job {two} is deleted.\n"
    assert_one_sentence(run("jobs", "remove", two), f"There is no job '{two}'")
    result = run("adapt", "--resume", "--json")
    assert result.exit_code == 0, result.output
    lines = records(result.stdout)
    (began,) = (line for line in lines if line["event"] == "job_started")
    assert (began["id"], lines[-1]["event"]) == (one, "result")
    assert store.adapter("one").active() == 1
    assert run("jobs").stdout == "No training runs, is paused or was interrupted.\n"
    assert_one_sentence(run("adapt", "--resume", notes[30]), "No training is paused or interrupted")


def test_listing_jobs_imports_no_torch(tmp_path):
    code = """
import sys
from sebp_edge import AdapterStore
AdapterStore(sys.argv[1]).jobs.list()
print({"torch", "numpy"} & {*sys.modules})
"""
    with start([code, tmp_path], cold=True) as one:
        assert one.communicate(timeout=60)[0] == "set()\n"
