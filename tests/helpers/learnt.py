"""Stores that have learnt texts, which tests copy, and Personalizers that go on with them."""

import functools
import shutil

import pytest
import torch
from builders import make_sentences
from failing_memory import RECIPE as SMALL
from quick import skip_assessment

from sebp_edge import AdapterStore, Personalizer

RECIPE = SMALL.replace(learning_rate=2e-2, epochs=1, batch_tokens=200)
NOTES = make_sentences(40)
OLD, NEW = NOTES[:30], NOTES[30:]
# So few that they are tested with folds.
FEW = NOTES[:13]
WEIGHTS = "adapter_model.safetensors"


class Stop(Exception):
    """An app does not go on."""


@pytest.fixture(scope="session")
def learnt(tmp_path_factory, model):
    """A function that returns the folder of a store whose first version has learnt these texts; tests copy it."""

    @functools.cache
    def store_of(*texts):
        store = tmp_path_factory.mktemp("stores")
        with pytest.MonkeyPatch.context() as patch:
            skip_assessment(patch)
            assert Personalizer(model, recipe=RECIPE, device="cpu", store=store).adapt([*texts]).active
        return store

    return lambda texts: store_of(*texts)


@pytest.fixture
def make_quick(model, learnt, tmp_path):
    """A function that makes a Personalizer whose model learns in a few steps, and whose events are in `events`.

    Its store is in this folder, and has learnt the texts `after`, if any.
    """

    def personalizer(store="store", *, after=None, model=model, **options):
        if after is not None:
            shutil.copytree(learnt(after), tmp_path / store)
        events = []
        options = {"recipe": RECIPE, "device": "cpu", "on_event": events.append} | options
        made = Personalizer(model, store=tmp_path / store, **options)
        made.events = events
        return made

    return personalizer


def roles(store, version=1):
    """What a version has used each of its texts for, in their order."""
    return [each.split for each in store.adapter("default").documents(version) if not each.absent]


def of_kind(personalizer, kind):
    return [event for event in personalizer.events if isinstance(event, kind)]


@pytest.fixture
def adapted(adapt, after_learning):
    """The command that adapts a model to a folder of notes, which are learnt already."""
    after_learning(AdapterStore())
    return adapt


def logits(personalizer, model=None):
    model = model or personalizer.in_use.adaptation.model
    with torch.no_grad():
        return model(torch.arange(7, 27)[None]).logits
