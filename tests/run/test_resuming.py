"""Pause, kill and resume: on the CPU, a training that goes on ends, bit for bit, as one without interruption."""

import hashlib
import shutil

import pytest
from builders import make_llama, make_sentences
from failing_memory import RECIPE as SMALL
from quick import skip_assessment

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.adapters.history import read_history
from sebp_edge.errors import Paused
from sebp_edge.events import (
    AdapterSaved,
    Evaluated,
    ExamplesEvaluated,
    JobStarted,
    ModelLoaded,
    StepDone,
    TextsRead,
    TrainingStarted,
)

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
    """The files of a version without those that have times, and what its record says but for the time and salt."""
    folder = store.adapter(name).version_folder(version)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.suffix == ".safetensors"
    }


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


# ------------------------------------------------------------------------------------------------------ what comes after


@pytest.fixture
def pause(model, notes, tmp_path):
    """A function that pauses a training on 30 notes of its own; returns its store, its job and its folder."""

    def paused(at=at_step("train", 3), **options):
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
    assert read_history(result.adapter_path) == read_history(expected.adapter_path)


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
    "pruned": {"method": "full", "learning_rate": 1e-3, "sparsity": {"pattern": "2:4", "dense": 0.2, "decay": 0.4}},
    "merged": {"merge_for": "q8_0"},
}


@pytest.mark.parametrize("kind", RECIPES)
def test_every_kind_of_training_goes_on_bit_for_bit(model, notes, tmp_path, monkeypatch, kind):
    recipe = RECIPE.replace(epochs=3, **RECIPES[kind])
    if kind == "8-bit moments":
        from sebp_edge.memory.options import MemoryOptions

        monkeypatch.setattr("sebp_edge.run.preparation.FASTEST", MemoryOptions(moments_in_8_bits=True))
    found = []
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


def test_updates_in_the_backward_pass_go_on_bit_for_bit(model, notes, tmp_path, updated_in_backward):
    test_every_kind_of_training_goes_on_bit_for_bit.__wrapped__ if False else None
    recipe = RECIPE.replace(epochs=3, method="full", learning_rate=1e-3)
    found = []
    for at in (None, at_step("train", 5)):
        store = AdapterStore(tmp_path / f"store-{at is None}")
        made = personalizer(model, store, at, recipe=recipe)
        if at is None:
            result = made.adapt(notes[30], activate_anyway=True)
        else:
            with pytest.raises(Paused):
                made.adapt(notes[30], activate_anyway=True)
            _, result = resume(store)
        found.append((bits(store), verdict(result)))
    assert found[0] == found[1]
