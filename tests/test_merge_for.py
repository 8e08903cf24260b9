"""`adapt` for an export: what is judged, used, recorded, planned and refused."""

import json

import pytest
import torch
from export_sources import make_source

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.models.adaptation import load
from sebp_edge.engine.models.lora import LoraAdapter
from sebp_edge.errors import MachineError, ModelError
from sebp_edge.events import Evaluated, Notice, silent

RECIPE = Recipe(
    name="test",
    description="",
    r=4,
    epochs=1,
    batch_tokens=400,
    context_length=64,
    learning_rate=1e-2,
    merge_for="q4_0",
)
PLAIN = Recipe(**vars(RECIPE) | {"merge_for": None})
IDS = torch.arange(7, 71)[None]


@pytest.fixture
def make_wide(tmp_path):
    """A function that makes a Personalizer of a model whose matrices are made of whole blocks."""
    model = make_source(tmp_path / "model", "llama")

    def personalizer(recipe=RECIPE, **options):
        return Personalizer(model, recipe=recipe, device="cpu", store=AdapterStore(tmp_path / "store"), **options)

    return personalizer


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.slow
def test_the_base_model_is_judged_as_rounded_too(make_wide, notes_folder):
    events = []
    result = make_wide(on_event=events.append).adapt(notes_folder, activate_anyway=True)
    plain = make_wide(RECIPE.replace(merge_for="q8_0")).adapt(notes_folder, name="other", activate_anyway=True)
    assert result.heldout_loss_before != plain.heldout_loss_before
    assert result.general_loss_before != plain.general_loss_before
    first = next(event for event in events if isinstance(event, Evaluated) and event.split == "test")
    assert first.loss == pytest.approx(result.heldout_loss_before, abs=1e-2)
    assert Notice("The base model and the adapter are judged as rounded to q4_0.") in events


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_the_version_records_what_it_was_trained_for_and_is_used_unrounded(make_wide, notes_folder):
    personalizer = make_wide()
    original = {name: each.clone() for name, each in personalizer.in_use.load(silent).model.state_dict().items()}
    result = personalizer.adapt(notes_folder, activate_anyway=True)
    assert json.loads((result.adapter_path / "sebp_edge.json").read_text())["recipe"]["merge_for"] == "q4_0"
    base, in_use = personalizer.in_use.base, logits(personalizer.in_use.adaptation.model)
    assert personalizer.in_use.adaptation.merge_for is None
    personalizer.in_use.detach_adapter()
    assert all(torch.equal(each, original[name]) for name, each in base.model.state_dict().items())
    assert torch.equal(logits(load(base, result.adapter_path).model), in_use)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_the_active_version_is_compared_as_rounded(make_wide, notes_folder, monkeypatch):
    make_wide(PLAIN).adapt(notes_folder, activate_anyway=True)
    rounded, load_folder = [], LoraAdapter.from_folder.__func__

    def recorded(cls, base, folder, merge_for=None):
        rounded.append(merge_for)
        return load_folder(cls, base, folder, merge_for)

    monkeypatch.setattr(LoraAdapter, "from_folder", classmethod(recorded))
    result = make_wide().adapt(notes_folder)
    assert (result.compared_with, result.not_comparable) == (1, "")
    assert rounded[0] == "q4_0"


def test_the_plan_counts_what_rounding_takes(make_wide, notes_folder):
    plain, rounded = (make_wide(recipe).plan(notes_folder).chosen for recipe in (PLAIN, RECIPE))
    # The largest matrix is 128 x 64, merged and rounded in fp32; and the embedding's original is kept.
    assert rounded.footprint.activations - plain.footprint.activations == 2 * 4 * 128 * 64
    assert rounded.footprint.weights - plain.footprint.weights >= 4 * 320 * 64
    assert rounded.seconds > plain.seconds


def test_a_budget_that_is_too_small_is_refused_without_advice_that_does_not_apply(make_wide, notes_folder):
    with pytest.raises(MachineError) as refusal:
        make_wide(memory_budget="1MB").adapt(notes_folder)
    assert "4 bits" not in str(refusal.value)


def test_rows_that_are_no_whole_blocks_are_refused_in_a_sentence(make, notes_folder):
    personalizer = make(recipe=RECIPE)
    with pytest.raises(ModelError, match="cannot be trained for q4_0; leave that out"):
        personalizer.adapt(notes_folder)
    assert personalizer.store.names() == []
