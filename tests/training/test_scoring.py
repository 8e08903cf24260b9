"""A score is the loss of an evaluation, for saved weights of every kind, and leaves the model as it was."""

import pytest
from builders import disturb, evaluated, make_llama, refuse_hoisting, save_model, unchanged
from failing_memory import CPU, RECIPE, recovering_learner, uneven_examples

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.models.adaptation import attach, load, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.evaluation import evaluate
from sebp_edge.engine.training.scoring import scoring
from sebp_edge.events import ExamplesEvaluated, silent

METHODS = {
    "lora": {},
    "lora, 4 bits": {"load_in_4bit": True},
    "lora, padded": {},
    "full": {"method": "full", "learning_rate": 1e-3},
}
EXAMPLES = uneven_examples()


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model with layers wide enough for 4 bits."""
    return save_model(
        make_llama(hidden_size=64, intermediate_size=128), tmp_path_factory.mktemp("models") / "wide-llama"
    )


def load_base(folder, recipe=RECIPE):
    return load_base_model(resolve(folder), recipe, CPU)


def score_of(base, model, examples=EXAMPLES, on_event=silent):
    with scoring(model, examples, Collator(64, base.pad_token_id), CPU, on_event) as losses:
        return losses()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_saved_adapter_has_the_loss_of_the_training(method, wide_folder, tmp_path):
    if "4 bits" in method:
        pytest.importorskip("bitsandbytes")
    recipe, padded = RECIPE.replace(**METHODS[method]), "padded" in method
    with recovering_learner(load_base(wide_folder, recipe), EXAMPLES, recipe, padded=padded) as learner:
        for parameter in trainable(learner.adaptation):
            parameter.data *= 1.1
        expected = evaluate(learner, evaluated(learner, EXAMPLES))
        learner.adaptation.save(tmp_path)
    base = load_base(wide_folder, recipe)
    adaptation = load(base, tmp_path)
    adaptation.model.requires_grad_(False)
    if padded:
        refuse_hoisting(base.model)
    with unchanged(adaptation.model):
        assert score_of(base, adaptation.model) == expected
    assert score_of(base, adaptation.model) == expected


@pytest.mark.parametrize("method", ["lora", "full"])
def test_with_the_adapter_disabled_it_is_the_base_models(method, base):
    expected = score_of(base, base.model)
    adaptation = disturb(attach(base, RECIPE.replace(method=method, learning_rate=1e-3), 0), 0.01)
    assert score_of(base, adaptation.model) != expected
    with adaptation.disabled():
        disabled = score_of(base, adaptation.model)
    assert disabled.tokens == expected.tokens
    assert disabled.nats == pytest.approx(expected.nats, rel=1e-6)


def test_it_can_be_stopped_between_micro_batches(base, small_evaluations):
    events = []

    def stop_at_second(event):
        events.append(event)
        if len(events) == 2:
            raise StopRequested

    with unchanged(base.model), pytest.raises(StopRequested):
        score_of(base, base.model, on_event=stop_at_second)
    assert [type(event) for event in events] == [ExamplesEvaluated] * 2
    assert events[1].done < events[1].examples == len(EXAMPLES)
