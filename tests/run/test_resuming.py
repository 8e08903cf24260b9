"""Pause, kill and resume: on the CPU, a training that goes on ends, bit for bit, as one without interruption."""

import hashlib

import pytest
from builders import make_llama, make_sentences
from failing_memory import RECIPE as SMALL

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.errors import Paused
from sebp_edge.events import (
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
        from quick import skip_assessment

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
