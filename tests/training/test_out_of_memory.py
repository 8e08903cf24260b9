"""Running out of memory: the step and the evaluation go on in smaller micro-batches."""

import weakref

import pytest
import torch
from builders import evaluated, limit_rows, make_sentences, make_step, train
from failing_memory import LENGTHS, RECIPE, Failing, equal, gradients, recovering_learner, uneven_examples

from sebp_edge.errors import BudgetExceeded
from sebp_edge.events import MemoryRanOut
from sebp_edge.machine.devices import clear_frames, ran_out_of_memory
from sebp_edge.models.adaptation import snapshot
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.learner import Learner
from sebp_edge.training.loop import Trainer
from sebp_edge.training.losses import RowLosses

CASES = {
    "lora": (RECIPE, False, 6),
    "lora, no prompt": (RECIPE, False, 0),
    "padded": (RECIPE, True, 6),
    "full": (RECIPE.replace(method="full"), False, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_wherever_memory_runs_out_the_step_is_that_of_smaller_micro_batches(base, case, monkeypatch):
    recipe, padded, prompt = CASES[case]
    examples = uneven_examples(prompt)
    rows = len(LENGTHS) * 64 if padded else sum(example.num_active_tokens for example in examples)
    half = -(-rows // 2)
    with recovering_learner(base, examples, recipe, max_rows=half, padded=padded) as learner:
        never = Failing()
        expected = gradients(learner, examples, never, monkeypatch)
    with recovering_learner(base, examples, recipe, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        # The first step tries out what later ones know.
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        whole = gradients(learner, examples, counting, monkeypatch)
        assert counting.count < never.count
        for number in range(1, counting.count + 1, 1 + counting.count // 30):
            limit_rows(learner, 4096)
            learner.events.clear()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            assert equal(found, expected), number
        assert equal(snapshot(learner.adaptation), before)
        # What failed left nothing behind that a whole step could see.
        limit_rows(learner, 4096)
        assert equal(gradients(learner, examples, Failing(), monkeypatch), whole)
    for one, other in zip(expected, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("plain_graphs")
def test_wherever_memory_runs_out_with_graphs_they_are_made_anew_for_smaller_micro_batches(base, monkeypatch):
    examples = uneven_examples()
    half = -(-sum(example.num_active_tokens for example in examples) // 2)
    with recovering_learner(base, examples) as learner:
        whole = gradients(learner, examples, Failing(), monkeypatch)

        def begin():
            limit_rows(learner, 4096)
            learner.inner.begin_graphs()
            learner.prepare(Schedule([[examples]]))
            learner.events.clear()

        begin()
        counting = Failing()
        gradients(learner, examples, counting, monkeypatch)
        for number in range(1, counting.count + 1, 1 + counting.count // 20):
            begin()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            captured = learner.inner.graphs._captured
            assert captured
            # Nothing is filled up to the size that did not fit.
            assert max(key.bucket.tokens for key in captured) <= half + 32
            for one, other in zip(found, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("plain_graphs")
def test_one_example_is_tried_without_graphs_before_it_is_the_end(base, monkeypatch):
    examples = uneven_examples()[:1]
    with recovering_learner(base, examples) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        learner.inner.begin_graphs()
        assert equal(gradients(learner, examples, Failing(100), monkeypatch), expected)
        assert learner.inner.graphs is None
        (notice,) = learner.events
        assert "memory ran out with them" in notice.message
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(make_step(learner, examples), 1e-3)


@pytest.mark.parametrize("number", [1, 50, 200, 400])
def test_running_out_of_memory_while_the_last_layer_is_verified_changes_nothing(base, number, monkeypatch):
    examples = uneven_examples()
    half = -(-sum(example.num_active_tokens for example in examples) // 2)
    with recovering_learner(base, examples, max_rows=half) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        tried = learner.inner.row_losses.hoisted._last_layer._exact
    with recovering_learner(base, examples) as learner:
        assert equal(gradients(learner, examples, Failing(number), monkeypatch), expected)
        assert learner.inner.row_losses.hoisted._last_layer._exact == tried
        assert learner.events == [MemoryRanOut(4096, half)]


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_several_micro_batches_has_the_loss_and_the_gradients_of_one(base, case, monkeypatch):
    recipe, padded, prompt = CASES[case]
    examples = uneven_examples(prompt)
    with recovering_learner(base, examples, recipe, padded=padded) as learner:
        whole = gradients(learner, examples, Failing(), monkeypatch)
    with recovering_learner(base, examples, recipe, max_rows=128 if padded else 60, padded=padded) as learner:
        assert len(learner.limit.cut(examples)) > 2
        parts = gradients(learner, examples, Failing(), monkeypatch)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_memory_that_runs_out_in_a_later_micro_batch_begins_the_step_again(base, case, monkeypatch):
    recipe, padded, prompt = CASES[case]
    examples = uneven_examples(prompt)
    with recovering_learner(base, examples, recipe, max_rows=256 if padded else 80, padded=padded) as learner:
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        expected = gradients(learner, examples, counting, monkeypatch)
        learner.events.clear()
        found = gradients(learner, examples, Failing(counting.count - 20), monkeypatch)
        assert [type(event) for event in learner.events] == [MemoryRanOut]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_memory_may_run_out_again_and_again(base, monkeypatch):
    examples = uneven_examples()
    with recovering_learner(base, examples) as learner:
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
    examples = uneven_examples()[:1]
    with recovering_learner(base, examples, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(make_step(learner, examples), 1e-3)
        assert not any(isinstance(event, MemoryRanOut) for event in learner.events)
        assert equal(snapshot(learner.adaptation), before)


def interrupted():
    raise KeyboardInterrupt


def out_of_memory_while_another_error_came():
    try:
        raise torch.OutOfMemoryError("no more")
    finally:
        raise RuntimeError("the capture failed")


def over_its_budget():
    raise BudgetExceeded("too much")


@pytest.mark.parametrize("end", [interrupted, out_of_memory_while_another_error_came, over_its_budget])
def test_activations_are_freed_before_the_models_weights_are_restored(base, end, monkeypatch):
    computed, there = [], []

    def compute_and_end():
        activations = torch.zeros(3)
        computed.append(weakref.ref(activations))
        end()

    remove = RowLosses.__exit__
    monkeypatch.setattr(RowLosses, "__exit__", lambda *given: there.append(computed[0]()) or remove(*given))
    with pytest.raises((RuntimeError, KeyboardInterrupt, BudgetExceeded)), recovering_learner(base, uneven_examples()):
        compute_and_end()
    assert there == [None]


def test_an_error_that_an_app_was_handling_keeps_what_it_holds(base):
    def app():
        local = [1, 2, 3]
        raise ValueError(local)

    try:
        app()
    except ValueError as of_the_app:
        with pytest.raises(KeyboardInterrupt), recovering_learner(base, uneven_examples()):
            interrupted()
        frame = of_the_app.__traceback__.tb_next.tb_frame
    assert frame.f_locals["local"] == [1, 2, 3]


def test_frames_of_an_error_that_is_its_own_cause_are_cleared():
    error = RuntimeError("odd")
    with pytest.raises(RuntimeError):
        raise error from error
    clear_frames(error)
    assert not ran_out_of_memory(error)


def test_other_errors_are_no_reason_to_try_again(base):
    examples = uneven_examples()
    with recovering_learner(base, examples) as learner:
        # The first step tries out what later ones know.
        learner.step(make_step(learner, examples), 1e-3)
        with pytest.raises(RuntimeError, match="no more"), Failing(100, error=RuntimeError):
            learner.step(make_step(learner, examples), 1e-3)
        assert learner.events == []


@pytest.mark.parametrize("padded", [False, True])
def test_held_out_losses_are_the_same_wherever_memory_runs_out(base, padded):
    examples = uneven_examples()
    with recovering_learner(base, examples, padded=padded) as learner:
        evaluate(learner, evaluated(learner, examples))
        with Failing() as counting:
            expected = evaluate(learner, evaluated(learner, examples))
        for number in range(1, counting.count, 1 + counting.count // 20):
            limit_rows(learner, 4096)
            learner.events.clear()
            with Failing(number, number + 150):
                found = evaluate(learner, evaluated(learner, examples))
            assert 1 <= sum(isinstance(event, MemoryRanOut) for event in learner.events) <= 2
            assert found.tokens == expected.tokens
            assert found.nats == pytest.approx(expected.nats, rel=1e-5)


def test_after_a_failure_later_steps_are_cut_smaller_from_their_start(base, monkeypatch):
    examples = uneven_examples()
    sizes, accumulate = [], Learner.accumulate

    def watched(self, micro_batch, loss_tokens):
        sizes.append(micro_batch.sizes.tokens)
        if len(sizes) == 1:
            torch.empty(2**60)  # the error that torch has for this on the CPU
        accumulate(self, micro_batch, loss_tokens)

    monkeypatch.setattr(Learner, "accumulate", watched)
    with recovering_learner(base, examples) as learner:
        progress = train(Trainer(learner, RECIPE, learner.events.append, "train"), examples, [])
    whole = sum(example.num_active_tokens for example in examples)
    half = -(-whole // 2)
    cut = [sum(one.num_active_tokens for one in group.examples) for group in learner.limit.cut(examples)]
    assert sizes == [whole, *cut, *cut]
    assert max(cut) <= half
    assert progress.steps == progress.total_steps == 2
    assert [event for event in learner.events if isinstance(event, MemoryRanOut)] == [MemoryRanOut(4096, half)]
    assert progress.tokens == 2 * sum(LENGTHS)


def test_memory_that_runs_out_in_a_training_is_no_more_than_an_event(make):
    events, accumulate = [], Learner.accumulate

    def failing(self, micro_batch, loss_tokens):
        with Failing(900):
            accumulate(self, micro_batch, loss_tokens)

    texts = make_sentences(24, words=30)
    recipe = RECIPE.replace(learning_rate=2e-2, epochs=3)
    expected = make(recipe=recipe).adapt(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "accumulate", lambda *a: failing(*a) if not _ran_out(events) else accumulate(*a))
        result = make(recipe=recipe, on_event=events.append).adapt(texts)
    assert _ran_out(events)
    assert result.kept
    assert result.heldout_loss_after == pytest.approx(expected.heldout_loss_after, rel=1e-4)


def _ran_out(events):
    return any(isinstance(event, MemoryRanOut) for event in events)


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
