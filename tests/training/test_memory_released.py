"""Memory is released: that of a failed micro-batch before the retry, and that of a training at its end."""

import gc
import weakref

import pytest
import torch
from builders import limit_rows, make_sentences, outlined
from failing_memory import RECIPE, Failing, accumulate_within, gradients, recovering_learner, uneven_examples

from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import trainable
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.engine.training.update import Update
from sebp_edge.errors import MachineError
from sebp_edge.events import MemoryRanOut, StepDone
from sebp_edge.ops import AdamW, Moments
from sebp_edge.research import Sparsified
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example


@pytest.fixture(scope="session")
def model_folder(two_layer_folder):
    return two_layer_folder


class Watching(Failing):
    """Also adds weak references to the results of operations to `made`."""

    def __init__(self, made, *numbers):
        super().__init__(*numbers)
        self.made = made

    def __torch_dispatch__(self, *arguments):
        out = super().__torch_dispatch__(*arguments)
        if isinstance(out, torch.Tensor):
            self.made.append(weakref.ref(out))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_a_failed_micro_batch_is_freed_before_the_retry(base, padded, monkeypatch):
    examples, made, alive = uneven_examples(), [], []

    def count(device):
        # Operations in place also return gradients and the loss, which stay alive.
        known = {id(parameter.grad) for parameter in trainable(learner.adaptation)} | {id(learner.plain._loss)}
        alive.append([tensor().shape for tensor in made if tensor() is not None and id(tensor()) not in known])

    with recovering_learner(base, examples, padded=padded) as learner:
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        gradients(learner, examples, counting, monkeypatch)
        monkeypatch.setattr("sebp_edge.engine.training.learner.release_memory", count)
        gc.disable()
        try:
            for number in range(1, counting.count + 1, 1 + counting.count // 4):
                limit_rows(learner, 4096)
                made.clear()
                gradients(learner, examples, Watching(made, number), monkeypatch)
        finally:
            gc.enable()
    assert len(alive) > 3
    assert not any(alive)


KINDS = TrainingRun, RecoveringLearner, RowLosses, Hoisted, Sparsified, Update, AdamW, Moments, Dataset, Example


def alive():
    """What exists of trainings, without what was collected with the tests."""
    return [one for one in gc.get_objects() if issubclass(type(one), KINDS)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", "folds, checkpoints", "not kept"])
def test_nothing_of_a_training_stays_alive(make, case, run_with):
    if "checkpoints" in case:
        run_with(MemoryOptions(checkpoints=1, small_buffers=True, moments_in_8_bits=True))
    changes = {"full": {"method": "full"}, "not kept": {"learning_rate": 1e-12}}.get(case, {})
    recipe = RECIPE.replace(**{"learning_rate": 2e-2, "batch_tokens": 200, "epochs": 2} | changes)
    seen, tensors = set(), []

    def see(event):
        # Each training has its own learner, whose moments and gradients are freed at its end.
        if isinstance(event, StepDone) and event.step == 1:
            found = [one for one in alive() if id(one) not in known]
            seen.update(map(type, found))
            for learner in (one for one in found if isinstance(one, RecoveringLearner)):
                moments = [value for moments in learner.plain.update._moments for value in moments if value is not None]
                gradients = [parameter.grad for parameter in learner.plain.parameters]
                tensors.extend(map(weakref.ref, moments + gradients))

    personalizer = make(recipe=recipe, on_event=see)
    gc.collect()
    before = alive()  # What other tests keep, held here so that its ids stay its own.
    known = {id(one) for one in before}
    gc.disable()
    try:
        result = personalizer.adapt(make_sentences(9, words=60) if "folds" in case else make_sentences(24, words=30))
        assert [type(one) for one in alive() if id(one) not in known] == []
        assert [tensor().shape for tensor in tensors if tensor() is not None] == []
    finally:
        gc.enable()
    assert len(seen) >= 8
    assert len(tensors) > (100 if "folds" in case else 20)
    assert result.passed == (case != "not kept")
    model = personalizer.in_use.base.model
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("number", [300, 700])
def test_too_little_memory_for_one_example_raises_one_sentence_and_releases_memory(make, number, monkeypatch):
    made, personalizer, events = [], make(), []
    personalizer.on_event = events.append
    accumulate_within(lambda _: Watching(made, number), monkeypatch)
    gc.disable()
    try:
        with pytest.raises(MachineError, match="Out of CPU memory before the first step; nothing was saved") as raised:
            personalizer.adapt(make_sentences(24))
        assert len(made) > number
        assert [tensor().shape for tensor in made if tensor() is not None] == []
    finally:
        gc.enable()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert len([event for event in events if isinstance(event, MemoryRanOut)]) > 2
    assert not any(isinstance(event, StepDone) for event in events)
    assert not any("forward" in vars(module) for module in personalizer.in_use.base.model.modules())


@pytest.mark.parametrize("padded", [False, True])
def test_unused_shared_projections_are_freed_after_an_error(base, padded):
    examples, computed = uneven_examples(), []

    def stop(layer, inputs, output):
        # By now queries, keys and values have been computed together.
        computed.extend(map(weakref.ref, [inputs[0], output]))
        raise torch.OutOfMemoryError

    with recovering_learner(base, examples, padded=padded) as learner:
        projection = learner.adaptation.model.get_base_model().model.layers[0].self_attn.q_proj
        hook = projection.register_forward_hook(stop)
        with pytest.raises(torch.OutOfMemoryError):
            learner.row_losses(outlined(learner, examples))
        assert len(computed) == 2
        assert [reference() for reference in computed] == [None, None]
        hook.remove()
