"""A model that learns to read the notes of reader_notes.py, and what it made of them."""

import shutil

import pytest
from builders import QUICK_TEMPLATE, make_tokenizer
from reader_notes import Learnt, make_quick, new_personalizer, save_model, watch_runs, write_general

from sebp_edge.ask import answer
from sebp_edge.run import replies


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "micro", make_tokenizer(QUICK_TEMPLATE))


@pytest.fixture(scope="session")
def general(tmp_path_factory):
    return write_general(tmp_path_factory.mktemp("general"))


@pytest.fixture(autouse=True)
def quick(monkeypatch, general):
    """After so few steps, a reader is right before it is sure of its many small tokens."""
    make_quick(monkeypatch, general)
    monkeypatch.setattr(answer, "MIN_PROBABILITY", 0.0)


@pytest.fixture(scope="session")
def learnt(tmp_path_factory, model, general):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # not that of the test which comes first
        make_quick(patch, general)
        runs = watch_runs(patch)
        personalizer = new_personalizer(model, tmp_path_factory.mktemp("stores"))
        return Learnt(personalizer.adapt(), personalizer.store, personalizer.events, runs[0])


@pytest.fixture
def when_asked(monkeypatch):
    """A function that sets what is called each time before questions are put to a model, with the model."""
    answer_all = replies.answer_all

    def watch(call):
        def answering(model, *arguments):
            call(model)
            return answer_all(model, *arguments)

        monkeypatch.setattr(replies, "answer_all", answering)

    return watch


@pytest.fixture
def runs(monkeypatch):
    return watch_runs(monkeypatch)


@pytest.fixture
def make(model, tmp_path, request):
    """A function that makes a Personalizer; after=True: whose store has a reader."""

    def personalizer(store="store", *, after=False, model=model, **options):
        if after:
            shutil.copytree(request.getfixturevalue("learnt").store.folder.parent, tmp_path / store)
        return new_personalizer(model, tmp_path / store, **options)

    return personalizer
