"""The saved adapter is the tested one, bit for bit: after loading, it has the test loss of the training."""

import pytest
import torch
from builders import make_llama, make_sentences, make_tokenizer
from failing_memory import RECIPE as SMALL

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.events import Evaluated, TrainingStarted, silent
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import make_dataset
from sebp_edge.texts.readers import read_texts
from sebp_edge.texts.schedule import make_schedules
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.recovery import RecoveringLearner

RECIPE = SMALL.replace(learning_rate=2e-2, epochs=3, batch_tokens=200)
METHODS = {
    "lora": {},
    "lora, 4 bits": {"load_in_4bit": True},
    # With this learning rate, updates are smaller than the spacing of bf16.
    "full": {"method": "full", "learning_rate": 1e-5},
    "full, large updates": {"method": "full", "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model with layers wide enough for 4 bits."""
    folder = tmp_path_factory.mktemp("models") / "wide-llama"
    make_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_adapter_has_the_test_loss_of_the_training(
    method, dtype, wide_folder, notes_folder, tmp_path, monkeypatch
):
    if "4 bits" in method:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("sebp_edge.machine.devices.pick_dtype", lambda device: dtype)
    options = {"recipe": RECIPE.replace(**METHODS[method]), "device": "cpu", "store": AdapterStore(tmp_path / "store")}
    trained = Personalizer(wide_folder, **options)
    result = trained.adapt(notes_folder)
    again = Personalizer(wide_folder, **options)
    again.load_adapter("default")
    assert loss_on_test_split(again, notes_folder) == result.heldout_loss_after < result.heldout_loss_before


def loss_on_test_split(personalizer, notes):
    base, recipe = personalizer.in_use.load(silent), personalizer.recipe.with_defaults()
    limit = base.model.config.max_position_embeddings
    dataset = make_dataset(read_texts(notes), base.tokenizer, personalizer.recipe, limit)
    adaptation, collator = personalizer.in_use.adaptation, Collator(dataset.context_length, base.pad_token_id)
    if recipe.method == "full":
        adaptation.model.requires_grad_(True)
    with RecoveringLearner(adaptation, recipe, dataset.examples, collator, lambda event: None) as learner:
        (schedule,) = make_schedules(dataset.examples, recipe, seed=0)
        learner.prepare(schedule)
        return evaluate(learner, schedule.test).mean


def test_a_last_training_that_is_worse_than_the_base_is_not_kept(make):
    """At this learning rate the folds improve on the base model, but the training on all documents does not."""
    events = []
    wild = RECIPE.replace(learning_rate=0.2, epochs=2, patience=2, max_grad_norm=1e9)
    personalizer = make(recipe=wild, on_event=events.append)
    result = personalizer.adapt(make_sentences(6, words=60))
    assert result.heldout_loss_after < result.heldout_loss_before < result.final_loss
    assert not result.kept
    assert f"final training is {result.final_loss:.3f}, which is no gain, so the adapter was not kept" in result.summary
    assert personalizer.store.names() == []
    assert personalizer.in_use.adaptation is None
    last = [event for event in events if isinstance(event, TrainingStarted | Evaluated)][-1]
    assert (last.phase, last.split, last.loss) == ("all documents", "train", result.final_loss)


def test_a_better_last_training_is_kept_and_its_loss_is_reported(make):
    result = make(recipe=RECIPE).adapt(make_sentences(6, words=60))
    assert result.kept
    assert result.final_loss < result.heldout_loss_before
