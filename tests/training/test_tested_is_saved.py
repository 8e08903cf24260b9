"""The tested states are saved, bit for bit: after loading, they have the test loss of the training."""

import pytest
import torch
from builders import make_llama, make_sentences, save_model
from failing_memory import RECIPE as SMALL
from safetensors.torch import load_file

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.engine.models.adaptation import load
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.engine.training.evaluation import HeldOutLoss, evaluate
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.events import Evaluated, TrainingStarted, silent
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.reading.readers import read_texts

pytestmark = pytest.mark.usefixtures("unassessed")
RECIPE = SMALL.replace(learning_rate=2e-2, epochs=2, batch_tokens=200)
METHODS = {
    "lora": {},
    # At this rate each epoch surely lowers the loss.
    "lora, 4 bits": {"load_in_4bit": True, "learning_rate": 4e-3},
    # With this learning rate, updates are smaller than the spacing of bf16.
    "full": {"method": "full", "learning_rate": 1e-5},
    "full, large updates": {"method": "full", "learning_rate": 1e-2},
}
WEIGHTS = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model with layers wide enough for 4 bits."""
    return save_model(
        make_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1),
        tmp_path_factory.mktemp("models") / "wide-llama",
    )


@pytest.fixture
def make_wide(wide_folder, tmp_path, machine):
    """A function that makes a Personalizer of the wide model, by dtype and method; any gain at all passes its gate."""

    def personalizer(dtype, method, **changes):
        if "4 bits" in method:
            pytest.importorskip("bitsandbytes")
        machine.computes_in(dtype)
        recipe = RECIPE.replace(margin=0, **METHODS[method], **changes)
        return Personalizer(wide_folder, recipe=recipe, device="cpu", store=AdapterStore(tmp_path / "store"))

    return personalizer


def loss_on_test_documents(personalizer, texts, folders) -> float:
    """Loads each saved state into a fresh model, and tests it as the training did."""
    base, recipe, parts = personalizer.in_use.load(silent), personalizer.recipe.with_defaults(), []
    limit = base.model.config.max_position_embeddings
    dataset = make_dataset(read_texts(texts), base.tokenizer, recipe, limit, Drawing(seed=0))
    collator = Collator(dataset.context_length, base.pad_token_id)
    judged = [schedule for schedule in make_schedules(dataset, recipe, seed=0) if not schedule.trains_on_all]
    for folder, schedule in zip(folders, judged, strict=True):
        adaptation = load(base, folder)
        if recipe.method == "full":
            adaptation.model.requires_grad_(True)
        with RecoveringLearner(adaptation, recipe, dataset.examples, collator, silent) as learner:
            learner.prepare(schedule)
            parts.append(evaluate(learner, schedule.test))
        adaptation.detach()
    return HeldOutLoss.merged(parts).mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype"),
    # Plain LoRA below, with folds; other methods without a refit.
    [(name, torch.bfloat16) for name in ("lora, 4 bits", "full")],
    ids=str,
)
def test_a_version_trained_on_all_documents_has_the_tested_state_beside_it(method, dtype, make_wide, notes_folder):
    result = make_wide(dtype, method, refit=True).adapt(notes_folder)
    assert result.trained_on_all
    (judged,) = (result.adapter_path / "judged").iterdir()
    loss = loss_on_test_documents(make_wide(dtype, method), notes_folder, [judged])
    assert loss == result.heldout_loss_after < result.heldout_loss_before
    name = WEIGHTS[METHODS[method].get("method", "lora")]
    tested, final = load_file(judged / name), load_file(result.adapter_path / name)
    assert tested.keys() == final.keys()
    assert not all(torch.equal(tested[key], final[key]) for key in final)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "dtype"), [("full", torch.float32), ("lora", torch.bfloat16)], ids=str)
def test_without_a_refit_the_version_is_the_tested_state(method, dtype, make_wide, notes_folder):
    result = make_wide(dtype, method, refit=False).adapt(notes_folder)
    assert (result.passed, result.trained_on_all, result.refit_loss) == (True, False, None)
    assert not (result.adapter_path / "judged").exists()
    loss = loss_on_test_documents(make_wide(dtype, method), notes_folder, [result.adapter_path])
    assert loss == result.heldout_loss_after < result.heldout_loss_before


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full, large updates"])
def test_with_folds_the_tested_state_of_each_is_beside_the_version(method, make_wide, tmp_path):
    texts = make_sentences(9, words=60)
    result = make_wide(torch.float32, method).adapt(texts)
    assert result.trained_on_all
    judged = sorted((result.adapter_path / "judged").iterdir())
    assert [folder.name for folder in judged] == ["1", "2", "3"]
    assert loss_on_test_documents(make_wide(torch.float32, method), texts, judged) == result.heldout_loss_after


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count"), [("lora", 24), ("full, large updates", 9)])
def test_a_later_version_is_compared_with_the_tested_states(method, count, make_wide):
    """The same adaptation once more gains exactly nothing, although the first was trained on all documents."""
    texts = make_sentences(count, words=60)
    first = make_wide(torch.float32, method, refit=True).adapt(texts)
    second = make_wide(torch.float32, method, refit=True).adapt(texts, fresh=True)
    assert (first.trained_on_all, second.compared_with, second.not_comparable) == (True, 1, "")
    assert (second.gain, second.gain_over_active, second.gain_over_active_at_least) == (first.gain, 0.0, 0.0)
    assert second.passed


def test_full_fine_tuning_is_trained_on_all_documents_only_if_the_recipe_says_so(make_wide, notes_folder):
    result = make_wide(torch.float32, "full, large updates").adapt(notes_folder)
    assert (result.passed, result.trained_on_all) == (True, False)


def phases(events):
    return [event.phase for event in events if isinstance(event, TrainingStarted)]


@pytest.mark.slow
def test_a_last_training_begins_in_the_judged_state(make):
    began = []

    def on_event(event):
        if isinstance(event, TrainingStarted):
            parameters = personalizer.in_use.base.model.named_parameters()
            trained = {name: parameter.clone() for name, parameter in parameters if parameter.requires_grad}
            began.append((event.phase, event.epochs, trained))

    personalizer = make(recipe=RECIPE.replace(epochs=3), on_event=on_event)
    result = personalizer.adapt(make_sentences(24, words=30))
    assert [(phase, epochs) for phase, epochs, _ in began] == [("train", 3), ("all documents", 1)]
    judged = load_file(next((result.adapter_path / "judged").iterdir()) / WEIGHTS["lora"])
    begun = {f"base_model.model.{name.replace('.default', '')}": value for name, value in began[-1][2].items()}
    assert begun.keys() == judged.keys() and all(torch.equal(begun[name], judged[name]) for name in judged)


def adapt_and_spoil(personalizer, texts, change):
    """Changes all trained weights as the training on all documents begins; returns the result and the events."""
    events = []

    @torch.no_grad()
    def spoil(event):
        events.append(event)
        if isinstance(event, TrainingStarted) and event.phase == "all documents":
            for parameter in personalizer.in_use.base.model.parameters():
                if parameter.requires_grad:
                    change(parameter)

    personalizer.on_event = spoil
    return personalizer.adapt(texts), events


@pytest.fixture(scope="module")
def tested_alone(model_folder, tmp_path_factory):
    """The weights of a version that is not trained on all documents, and the texts that it has learnt."""
    texts, store = make_sentences(24, words=30), AdapterStore(tmp_path_factory.mktemp("alone"))
    recipe = RECIPE.replace(refit=False)
    result = Personalizer(model_folder, recipe=recipe, device="cpu", store=store, seed=2).adapt(texts)
    return texts, load_file(result.adapter_path / WEIGHTS["lora"])


CHANGES = {"lowers no loss": lambda weight: weight.mul_(30), "diverges": lambda weight: weight.fill_(torch.nan)}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_last_training_that_fails_is_dropped_for_the_tested_state(make, tested_alone, change):
    texts, expected = tested_alone
    result, events = adapt_and_spoil(make(recipe=RECIPE, seed=2), texts, change)
    assert phases(events) == ["train", "all documents"]
    assert (result.passed, result.active, result.trained_on_all) == (True, True, False)
    validation = [e.loss for e in events if isinstance(e, Evaluated) and e.split == "validation" and e.best]
    if change is CHANGES["diverges"]:
        assert result.to_dict()["refit_loss"] != result.refit_loss  # NaN
    else:
        assert result.refit_loss >= validation[-1]
        assert "A training on all documents made it no better, so the adapter is as it was tested." in result.summary
    found = load_file(result.adapter_path / WEIGHTS["lora"])
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_with_folds_a_last_training_that_lowers_no_loss_is_not_kept(make, two_layer_folder):
    """With folds there is no single tested state to use instead."""
    personalizer = make(two_layer_folder, recipe=RECIPE.replace(margin=0))
    result, events = adapt_and_spoil(personalizer, make_sentences(9, words=60), CHANGES["lowers no loss"])
    assert result.gain_at_least >= result.margin
    assert (result.verdict, result.passed, result.active) == ("refit failed", False, False)
    assert "the last training, on all documents, made it worse again" in result.summary
    assert (personalizer.store.adapter("default").versions(), personalizer.store.adapter("default").active()) == (
        [1],
        None,
    )
    assert personalizer.in_use.adaptation is None
    last = [event for event in events if isinstance(event, TrainingStarted | Evaluated)][-1]
    assert (last.phase, last.split, last.loss) == ("all documents", "train", result.refit_loss)


@pytest.mark.slow
def test_what_the_gate_does_not_keep_is_not_trained_again(make, notes_folder):
    events = []
    result = make(recipe=RECIPE.replace(learning_rate=1e-9), on_event=events.append).adapt(notes_folder)
    assert (result.verdict, phases(events)) == ("no gain", ["train"])
