"""Running out of memory: the step and the evaluation go on in smaller micro-batches, and all memory is given back."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from builders import make_examples, make_sentences
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import MachineError
from sebp_edge.events import MemoryRanOut, StepDone
from sebp_edge.models.adaptation import attach, snapshot, trainable
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.models.machine import ran_out_of_memory
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Collator
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.learner import Learner
from sebp_edge.training.loop import Trainer
from sebp_edge.training.spending import Spending
from sebp_edge.training.trial import Trial
from sebp_edge.training.update import Update

RECIPE = Recipe(name="test", description="", r=4, learning_rate=5e-3, epochs=2, batch_tokens=10**6, context_length=64)
LENGTHS = [31, 2, 17, 40, 5, 23, 27, 30]
CPU = torch.device("cpu")


def odd_examples(prompt=6):
    return make_examples(LENGTHS, prompt)


@pytest.fixture
def base(model_folder):
    return load_base_model(resolve(model_folder), RECIPE, CPU)


@contextmanager
def learning(base, examples, recipe=RECIPE, max_rows=4096, padded=False):
    """A learner on fresh weights that are not zero, and its events."""
    adaptation, events = attach(base, recipe, 0), []
    draw = torch.Generator().manual_seed(2)
    if recipe.method == "lora":
        for parameter in trainable(adaptation):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    layer = base.model.model.layers[1].self_attn
    if padded:
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, s_aux=torch.ones(1))
    try:
        with Learner(adaptation, recipe, examples, Collator(64, base.pad_token_id), events.append) as learner:
            assert (learner.rows.hoisted is None) == padded
            learner.rows.max_rows = max_rows
            learner.events = events
            yield learner
    finally:
        if padded:
            del layer.forward
        adaptation.detach()


class Failing(TorchDispatchMode):
    """Memory runs out in the operations of these numbers, counted over all that ran within it."""

    def __init__(self, *numbers, error=torch.OutOfMemoryError):
        super().__init__()
        self.numbers, self.error, self.count = numbers, error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count in self.numbers:
            raise self.error("no more")
        return function(*args, **(kwargs or {}))


class Watching(Failing):
    """Also remembers in `made`, weakly, what operations give."""

    def __init__(self, made, *numbers):
        super().__init__(*numbers)
        self.made = made

    def __torch_dispatch__(self, *arguments):
        out = super().__torch_dispatch__(*arguments)
        if isinstance(out, torch.Tensor):
            self.made.append(weakref.ref(out))
        return out


def gradients(learner, examples, failing, monkeypatch):
    """The gradients of a step whose micro-batches run within `failing`, and its loss."""
    accumulate, found = Learner._accumulate, []

    def watched(self, *arguments):
        with failing:
            accumulate(self, *arguments)

    def keep(self):
        found.extend(parameter.grad.clone() for parameter in trainable(learner.adaptation))
        self.reset()
        return torch.zeros(())

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_accumulate", watched)
        patch.setattr(Update, "finish", keep)
        loss = learner.step(examples, 1e-3).loss
    return [loss, *found]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS = {
    "lora": (RECIPE, False, 6),
    "lora, no prompt": (RECIPE, False, 0),
    "padded": (RECIPE, True, 6),
    "full": (RECIPE.replace(method="full"), False, 6),
}


@pytest.mark.parametrize("way", WAYS)
def test_wherever_memory_runs_out_the_step_is_that_of_smaller_micro_batches(base, way, monkeypatch):
    recipe, padded, prompt = WAYS[way]
    examples = odd_examples(prompt)
    rows = len(LENGTHS) * 64 if padded else sum(example.num_active_tokens for example in examples)
    half = -(-rows // 2)
    with learning(base, examples, recipe, max_rows=half, padded=padded) as learner:
        never = Failing()
        expected = gradients(learner, examples, never, monkeypatch)
    with learning(base, examples, recipe, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        # The first step tries out what later ones know.
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        whole = gradients(learner, examples, counting, monkeypatch)
        assert counting.count < never.count
        for number in range(1, counting.count + 1, 1 + counting.count // 30):
            learner.rows.max_rows = 4096
            learner.events.clear()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            assert equal(found, expected), number
        assert equal(snapshot(learner.adaptation), before)
        # What failed left nothing behind that a whole step could see.
        learner.rows.max_rows = 4096
        assert equal(gradients(learner, examples, Failing(), monkeypatch), whole)
    for one, other in zip(expected, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class PlainGraphs:
    """Stands in for captured graphs where there is no GPU: a replay is the function itself."""

    rehearsing = False

    def __init__(self, device, on_event):
        pass

    def rehearse(self, function):
        function()

    def capture(self, part, function):
        return function


def test_wherever_memory_runs_out_with_graphs_they_are_made_anew_for_smaller_micro_batches(base, monkeypatch):
    monkeypatch.setattr("sebp_edge.training.learner.Graphs", PlainGraphs)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    examples = odd_examples()
    half = -(-sum(example.num_active_tokens for example in examples) // 2)
    with learning(base, examples) as learner:
        whole = gradients(learner, examples, Failing(), monkeypatch)

        def begin():
            learner.rows.max_rows = 4096
            learner._graphs = learner._no_graphs_yet()
            learner.prepare([examples])
            learner.events.clear()

        begin()
        counting = Failing()
        gradients(learner, examples, counting, monkeypatch)
        for number in range(1, counting.count + 1, 1 + counting.count // 20):
            begin()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            buckets = learner._graphs._with_gradients
            assert buckets
            # Nothing is filled up to the size that did not fit.
            assert max(bucket.tokens for bucket in buckets) <= half + 32
            for one, other in zip(found, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_example_is_tried_without_graphs_before_it_is_the_end(base, monkeypatch):
    monkeypatch.setattr("sebp_edge.training.learner.Graphs", PlainGraphs)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    examples = odd_examples()[:1]
    with learning(base, examples) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        learner._graphs = learner._no_graphs_yet()
        assert equal(gradients(learner, examples, Failing(100), monkeypatch), expected)
        assert learner._graphs is None
        (notice,) = learner.events
        assert "memory ran out with them" in notice.message
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(examples, 1e-3)


@pytest.mark.parametrize("number", [1, 50, 200, 400])
def test_memory_that_runs_out_while_the_last_layer_is_tried_out_changes_nothing(base, number, monkeypatch):
    examples = odd_examples()
    half = -(-sum(example.num_active_tokens for example in examples) // 2)
    with learning(base, examples, max_rows=half) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        tried = learner.rows.hoisted._last_layer._exact
    with learning(base, examples) as learner:
        assert equal(gradients(learner, examples, Failing(number), monkeypatch), expected)
        assert learner.rows.hoisted._last_layer._exact == tried
        assert learner.events == [MemoryRanOut(4096, half)]


def test_memory_may_run_out_again_and_again(base, monkeypatch):
    examples = odd_examples()
    with learning(base, examples) as learner:
        whole = gradients(learner, examples, Failing(), monkeypatch)
        found = gradients(learner, examples, Failing(300, 500), monkeypatch)
        first, second = learner.events
        assert first == MemoryRanOut(4096, -(-sum(example.num_active_tokens for example in examples) // 2))
        assert second.max_rows_before == first.max_rows
        assert second.max_rows <= -(-first.max_rows // 2)
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_a_single_example_that_does_not_fit_is_the_end(base, padded):
    examples = odd_examples()[:1]
    with learning(base, examples, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(examples, 1e-3)
        assert not any(isinstance(event, MemoryRanOut) for event in learner.events)
        assert equal(snapshot(learner.adaptation), before)


def test_other_errors_are_no_reason_to_try_again(base):
    examples = odd_examples()
    with learning(base, examples) as learner:
        with pytest.raises(RuntimeError, match="no more"), Failing(100, error=RuntimeError):
            learner.step(examples, 1e-3)
        assert learner.events == []


@pytest.mark.parametrize("padded", [False, True])
def test_held_out_losses_are_the_same_wherever_memory_runs_out(base, padded):
    examples = odd_examples()
    with learning(base, examples, padded=padded) as learner:
        evaluate(learner, examples)
        with Failing() as counting:
            expected = evaluate(learner, examples)
        for number in range(1, counting.count, 1 + counting.count // 20):
            learner.rows.max_rows = 4096
            learner.events.clear()
            with Failing(number, number + 150):
                found = evaluate(learner, examples)
            assert 1 <= len(learner.events) <= 2
            assert found.tokens == expected.tokens
            assert found.nats == pytest.approx(expected.nats, rel=1e-5)


def test_after_a_failure_later_steps_are_cut_smaller_from_their_start(base, monkeypatch):
    examples = odd_examples()
    sizes, accumulate = [], Learner._accumulate

    def watched(self, micro_batch, loss_tokens):
        sizes.append(sum(example.num_active_tokens for example in micro_batch))
        if len(sizes) == 1:
            torch.empty(2**60)  # the error that torch has for this on the CPU
        accumulate(self, micro_batch, loss_tokens)

    monkeypatch.setattr(Learner, "_accumulate", watched)
    with learning(base, examples) as learner:
        progress = Trainer(learner, RECIPE, 0, learner.events.append, "train").train(examples, [])
    whole = sum(example.num_active_tokens for example in examples)
    half = -(-whole // 2)
    cut = [sum(one.num_active_tokens for one in group) for group in learner.rows.micro_batches(examples)]
    assert sizes == [whole, *cut, *cut]
    assert max(cut) <= half
    assert progress.steps == progress.total_steps == 2
    assert [event for event in learner.events if isinstance(event, MemoryRanOut)] == [MemoryRanOut(4096, half)]
    assert progress.tokens == 2 * sum(LENGTHS)


@pytest.mark.parametrize("padded", [False, True])
def test_what_failed_is_freed_before_it_is_tried_again(base, padded, monkeypatch):
    examples, made, alive = odd_examples(), [], []
    give_back = "sebp_edge.training.learner.give_memory_back"

    def count(device):
        # What is added to is among what operations give.
        known = {id(parameter.grad) for parameter in trainable(learner.adaptation)} | {id(learner._loss)}
        alive.append([tensor().shape for tensor in made if tensor() is not None and id(tensor()) not in known])

    with learning(base, examples, padded=padded) as learner:
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        gradients(learner, examples, counting, monkeypatch)
        monkeypatch.setattr(give_back, count)
        gc.disable()
        try:
            for number in range(1, counting.count + 1, 1 + counting.count // 20):
                learner.rows.max_rows = 4096
                made.clear()
                gradients(learner, examples, Watching(made, number), monkeypatch)
        finally:
            gc.enable()
    assert len(alive) > 15
    assert not any(alive)


@pytest.fixture
def make(model_folder, tmp_path):
    def personalizer(**options):
        options = {"recipe": RECIPE, "device": "cpu", "store": AdapterStore(tmp_path / "store")} | options
        return Personalizer(model_folder, **options)

    return personalizer


@pytest.fixture
def made(monkeypatch):
    """Weak references to what trainings make: trials, learners, handles, optimizers, moments, examples; no garbage is
    collected meanwhile."""
    references, enter, leave = [], Learner.__enter__, Learner.__exit__

    def noted(learner):
        update = learner._update
        parts = [learner, learner.rows, learner.rows.hoisted or learner.rows._padded, update, update._adamw]
        references.extend(map(weakref.ref, parts))
        return enter(learner)

    def left(learner, *exception):
        moments = [value for moments in learner._update._moments for value in moments if value is not None]
        gradients = [parameter.grad for parameter in learner._parameters]
        references.extend(map(weakref.ref, [*moments, *gradients]))
        leave(learner, *exception)

    make_trial = Trial.__init__

    def tried(trial, base, dataset, *arguments):
        references.extend(map(weakref.ref, [trial, dataset, *dataset.examples]))
        make_trial(trial, base, dataset, *arguments)

    make_sparsified = Sparsified.__init__

    def sparsified(handle, *arguments):
        references.append(weakref.ref(handle))
        make_sparsified(handle, *arguments)

    monkeypatch.setattr(Sparsified, "__init__", sparsified)
    monkeypatch.setattr(Learner, "__enter__", noted)
    monkeypatch.setattr(Learner, "__exit__", left)
    monkeypatch.setattr(Trial, "__init__", tried)
    gc.collect()
    gc.disable()
    yield references
    gc.enable()


@pytest.mark.parametrize("way", ["lora", "full", "folds", "not kept", "checkpoints"])
def test_an_adaptation_leaves_nothing_alive_but_itself(make, made, way, monkeypatch):
    if way == "checkpoints":
        spending = Spending(checkpoints=1, in_pieces=True, moments_in_8_bits=True)
        monkeypatch.setattr(Personalizer, "_chosen", lambda own, _: (own.recipe.settled(), spending))
    changes = {"full": {"method": "full"}, "not kept": {"learning_rate": 1e-12}}.get(way, {})
    recipe = RECIPE.replace(**{"learning_rate": 2e-2, "batch_tokens": 200, "epochs": 3} | changes)
    personalizer = make(recipe=recipe)
    result = personalizer.adapt(make_sentences(9 if way == "folds" else 24, words=60))
    assert result.kept == (way != "not kept")
    assert len(made) > 40
    assert [type(reference()) for reference in made if reference() is not None] == []
    model = personalizer._base.model
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_runs_out_in_a_training_is_no_more_than_an_event(make):
    events, accumulate = [], Learner._accumulate

    def failing(self, micro_batch, loss_tokens):
        with Failing(900):
            accumulate(self, micro_batch, loss_tokens)

    texts = make_sentences(24, words=30)
    recipe = RECIPE.replace(learning_rate=2e-2, epochs=3)
    expected = make(recipe=recipe).adapt(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "_accumulate", lambda *a: failing(*a) if not _ran_out(events) else accumulate(*a))
        result = make(recipe=recipe, on_event=events.append).adapt(texts)
    assert _ran_out(events)
    assert result.kept
    assert result.heldout_loss_after == pytest.approx(expected.heldout_loss_after, rel=1e-4)


def _ran_out(events):
    return any(isinstance(event, MemoryRanOut) for event in events)


@pytest.mark.parametrize("number", [300, 700])
def test_memory_that_does_not_suffice_for_one_example_is_one_sentence_and_is_given_back(make, number, monkeypatch):
    accumulate, made = Learner._accumulate, []

    def failing(self, micro_batch, loss_tokens):
        with Watching(made, number):
            accumulate(self, micro_batch, loss_tokens)

    personalizer, events = make(), []
    personalizer.on_event = events.append
    monkeypatch.setattr(Learner, "_accumulate", failing)
    gc.disable()
    try:
        with pytest.raises(MachineError, match="ran out while training; nothing was saved") as raised:
            personalizer.adapt(make_sentences(24))
        assert len(made) > number
        assert [tensor().shape for tensor in made if tensor() is not None] == []
    finally:
        gc.enable()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert len([event for event in events if isinstance(event, MemoryRanOut)]) > 2
    assert not any(isinstance(event, StepDone) for event in events)
    assert not any("forward" in vars(module) for module in personalizer._base.model.modules())


@pytest.mark.parametrize("padded", [False, True])
def test_projections_that_nobody_asked_for_any_more_are_let_go_of(base, padded):
    examples, computed = odd_examples(), []

    def stop(layer, inputs, output):
        # Keys and values are computed by now, together with queries.
        computed.extend(map(weakref.ref, [inputs[0], output]))
        raise torch.OutOfMemoryError

    with learning(base, examples, padded=padded) as learner:
        projection = learner.adaptation.model.get_base_model().model.layers[0].self_attn.q_proj
        hook = projection.register_forward_hook(stop)
        with pytest.raises(torch.OutOfMemoryError):
            learner.rows(examples)
        assert len(computed) == 2
        assert [reference() for reference in computed] == [None, None]
        hook.remove()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_these_errors_say_that_memory_ran_out(error):
    assert ran_out_of_memory(error)


def test_these_errors_say_something_else():
    assert not ran_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not ran_out_of_memory(KeyboardInterrupt())
    assert not ran_out_of_memory(None)


def test_the_cpu_says_that_memory_ran_out():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert ran_out_of_memory(raised.value)


def test_an_error_of_the_clean_up_does_not_hide_that_memory_ran_out():
    with pytest.raises(RuntimeError, match="capture") as raised:
        try:
            raise torch.OutOfMemoryError
        finally:
            raise RuntimeError("capture invalidated")
    assert ran_out_of_memory(raised.value)
