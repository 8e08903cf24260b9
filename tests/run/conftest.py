"""Trainings that are paused, and what they are without a pause."""

import shutil

import pytest
from builders import make_sentences, write_notes
from command import RECIPE
from paused_jobs import THIRD_STEP, bits, personalizer, verdict
from quick import skip_assessment

from sebp_edge import AdapterStore, Politeness, Recipe
from sebp_edge.errors import Paused


@pytest.fixture(scope="session")
def notes(tmp_path_factory):
    """Folders of notes by their number: of 30 one part is for tests, 13 are trained on in folds."""
    root = tmp_path_factory.mktemp("notes")
    return {number: write_notes(root / str(number), make_sentences(40)[:number]) for number in (13, 30)}


@pytest.fixture(scope="session")
def whole(model, notes, tmp_path_factory):
    """What uninterrupted trainings on folders of notes are, by the folder, and their stores, which tests copy."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        for number, folder in notes.items():
            store = tmp_path_factory.mktemp("whole") / "store"
            made = personalizer(model, store)
            result = made.adapt(folder, activate_anyway=True)
            found[number] = bits(made.store), verdict(result), result.curves, made.events, store
    return found


@pytest.fixture
def saves_each_step(monkeypatch):
    """Saves a checkpoint after each step, however long that takes."""
    monkeypatch.setattr("sebp_edge.engine.training.checkpoint.SHARE", 1e9)


@pytest.fixture
def full_disk(monkeypatch):
    """A function after which no checkpoint fits on the disk."""

    def full(*_):
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr("sebp_edge.engine.training.checkpoint.write_tensors", full)


@pytest.fixture(scope="session")
def paused(model, notes, tmp_path_factory):
    """A folder with notes and a store whose job is a training on them that was paused at its third step; and a copy."""
    root = tmp_path_factory.mktemp("paused")
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        pause_in(root / "used", model, notes, THIRD_STEP)
    return shutil.copytree(root / "used", root / "kept").with_name("used"), root / "kept"


def pause_in(root, model, notes, at, **options):
    folder = shutil.copytree(notes[30], root / "notes", dirs_exist_ok=True)
    with pytest.raises(Paused):
        personalizer(model, AdapterStore(root / "store"), at, **options).adapt(folder, activate_anyway=True)


@pytest.fixture
def pause(model, notes, paused, tmp_path):
    """A function that pauses a training on 30 notes of its own; returns its store, its job and its folder."""

    def pause(at=None, **options):
        root, kept = paused
        if at or options:
            root = tmp_path
            pause_in(root, model, notes, at or THIRD_STEP, **options)
        else:  # a job names its folders
            shutil.rmtree(root)
            shutil.copytree(kept, root)
        store = AdapterStore(root / "store")
        return store, store.jobs.list()[-1], root / "notes"

    return pause


@pytest.fixture
def polite(make, tmp_path):
    """A function that makes a Personalizer that waits; `react` gets it and each event."""
    (tmp_path / "test.toml").write_text(RECIPE)

    def personalizer(react=lambda made, event: None, **options):
        def sink(event):
            made.events.append(event)
            react(made, event)

        options = {"politeness": Politeness(waits=True), "recipe": Recipe.load(tmp_path / "test.toml")} | options
        made = make(on_event=sink, **options)
        made.events = []
        return made

    return personalizer
