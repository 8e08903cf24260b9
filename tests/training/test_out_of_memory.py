"""If memory runs out, the step or the evaluation continues with smaller micro-batches."""

import random
import weakref
from contextlib import nullcontext

import pytest
import torch
from builders import evaluated, limit_rows, make_llama, make_step, outlined, save_model, schedule_of, train
from failing_memory import (
    CPU,
    LENGTHS,
    RECIPE,
    Failing,
    accumulate_within,
    equal,
    gradients,
    recovering_learner,
    uneven_examples,
)

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import snapshot
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.training.evaluation import evaluate, sum_by_document
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.errors import BudgetExceeded
from sebp_edge.events import MemoryRanOut

WITH_DEQUANTISED = MemoryOptions(dequantised_blocks=1)
CASES = {
    "lora": (RECIPE, False, 6),
    "lora, no prompt": (RECIPE, False, 0),
    "padded": (RECIPE, True, 6),
    "full": (RECIPE.replace(method="full"), False, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wherever_memory_runs_out_the_step_equals_that_of_smaller_micro_batches(base, case, monkeypatch):
    recipe, padded, prompt = CASES[case]
    examples = uneven_examples(prompt)
    rows = len(LENGTHS) * 64 if padded else sum(example.num_active_tokens for example in examples)
    half = -(-rows // 2)
    with recovering_learner(base, examples, recipe, max_rows=half, padded=padded) as learner:
        never = Failing()
        expected = gradients(learner, examples, never, monkeypatch)
    with recovering_learner(base, examples, recipe, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        # Only the first step verifies the last layer.
        gradients(learner, examples, Failing(), monkeypatch)
        counting = Failing()
        whole = gradients(learner, examples, counting, monkeypatch)
        assert counting.count < never.count
        stride = 1 + counting.count // 2
        for number in range(random.randint(1, stride), counting.count + 1, stride):
            limit_rows(learner, 4096)
            learner.events.clear()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            assert equal(found, expected), number
        assert equal(snapshot(learner.adaptation), before)
        # The failures do not affect a later whole step.
        limit_rows(learner, 4096)
        assert equal(gradients(learner, examples, Failing(), monkeypatch), whole)
    torch.testing.assert_close(expected, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
def test_wherever_memory_runs_out_graphs_are_replaced_by_those_of_smaller_micro_batches(base, monkeypatch):
    examples = uneven_examples()
    half = -(-sum(example.num_active_tokens for example in examples) // 2)
    with recovering_learner(base, examples) as learner:
        whole = gradients(learner, examples, Failing(), monkeypatch)

        def begin():
            limit_rows(learner, 4096)
            learner.plain.begin_graphs()
            learner.prepare(schedule_of(learner, [[examples]]))
            learner.events.clear()

        begin()
        counting = Failing()
        gradients(learner, examples, counting, monkeypatch)
        for number in range(random.randint(1, 50), counting.count + 1, 1 + counting.count // 2):
            begin()
            found = gradients(learner, examples, Failing(number), monkeypatch)
            assert learner.events == [MemoryRanOut(4096, half)]
            captured = learner.plain.graphs._captured
            assert captured
            # No bucket has the size that did not fit.
            assert max(key.bucket.tokens for key in captured) <= half + 32
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize(("reason", "num_examples"), [("the step failed", 1), ("other programs", 8)])
def test_dequantised_weights_are_freed_first(reason, num_examples, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    save_model(make_llama(hidden_size=64, intermediate_size=192), tmp_path)
    base, examples = load_base_model(resolve(tmp_path), RECIPE.replace(load_in_4bit=True), CPU), uneven_examples()
    guard = MemoryGuard(CPU)
    with recovering_learner(base, examples[:num_examples], limit=guard, options=WITH_DEQUANTISED) as learner:
        expected = gradients(learner, examples[:num_examples], Failing(), monkeypatch)
        learner.plain.begin_graphs()
        learner.prepare(schedule_of(learner, [[examples[:num_examples]]]))
        learner.events.clear()
        failing = Failing(100) if reason == "the step failed" else Failing()
        if reason == "other programs":
            guard.shortfall = lambda: 10**6
        found = gradients(learner, examples[:num_examples], failing, monkeypatch)
        (notice,) = learner.events
        assert notice.message == "Memory is short, so from now on every pass dequantises all 4-bit weights."
        assert learner.row_losses.hoisted.num_dequantised == 0
        assert learner.limit.max_rows == 4096 and learner.plain.graphs is not None
        # Filled up to a bucket, and so rounded otherwise.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("plain_graphs")
def test_a_single_example_is_run_without_graphs_before_the_training_ends(base, monkeypatch):
    examples = uneven_examples()[:1]
    with recovering_learner(base, examples) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        learner.plain.begin_graphs()
        assert equal(gradients(learner, examples, Failing(100), monkeypatch), expected)
        assert learner.plain.graphs is None
        (notice,) = learner.events
        assert "memory ran out with them" in notice.message
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(make_step(learner, examples), 1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_a_single_example_that_does_not_fit_ends_the_training(base, padded):
    examples = uneven_examples()[:1]
    with recovering_learner(base, examples, padded=padded) as learner:
        before = snapshot(learner.adaptation)
        with pytest.raises(torch.OutOfMemoryError), Failing(100):
            learner.step(make_step(learner, examples), 1e-3)
        assert not any(isinstance(event, MemoryRanOut) for event in learner.events)
        assert equal(snapshot(learner.adaptation), before)


def interrupt():
    raise KeyboardInterrupt


def run_out_of_memory_and_fail_again():
    try:
        raise torch.OutOfMemoryError("no more")
    finally:
        raise RuntimeError("the capture failed")


def exceed_the_budget():
    raise BudgetExceeded("too much")


@pytest.mark.parametrize("end", [interrupt, run_out_of_memory_and_fail_again, exceed_the_budget])
def test_activations_are_freed_before_the_models_weights_are_restored(base, end, monkeypatch):
    computed, alive = [], []

    def compute_and_end():
        activations = torch.zeros(3)
        computed.append(weakref.ref(activations))
        end()

    remove = RowLosses.__exit__
    monkeypatch.setattr(RowLosses, "__exit__", lambda *given: alive.append(computed[0]()) or remove(*given))
    with pytest.raises((RuntimeError, KeyboardInterrupt, BudgetExceeded)), recovering_learner(base, uneven_examples()):
        compute_and_end()
    assert alive == [None]


def test_the_frames_of_an_error_that_an_app_is_handling_are_not_cleared(base):
    def app():
        local = [1, 2, 3]
        raise ValueError(local)

    try:
        app()
    except ValueError as of_the_app:
        with pytest.raises(KeyboardInterrupt), recovering_learner(base, uneven_examples()):
            interrupt()
        frame = of_the_app.__traceback__.tb_next.tb_frame
    assert frame.f_locals["local"] == [1, 2, 3]


def test_after_other_errors_there_is_no_retry(base):
    examples = uneven_examples()
    with recovering_learner(base, examples) as learner:
        # Only the first step verifies the last layer.
        learner.step(make_step(learner, examples), 1e-3)
        with pytest.raises(RuntimeError, match="no more"), Failing(100, error=RuntimeError):
            learner.step(make_step(learner, examples), 1e-3)
        assert learner.events == []


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_held_out_losses_are_the_same_wherever_memory_runs_out(base, padded):
    examples = uneven_examples()
    with recovering_learner(base, examples, padded=padded) as learner:
        evaluate(learner, evaluated(learner, examples))
        with Failing() as counting:
            losses = list(learner.losses(evaluated(learner, examples)))
        expected = sum_by_document(losses)
        for number in (1, random.randint(2, counting.count)):
            limit_rows(learner, 4096)
            learner.events.clear()
            with Failing(number, number + 150):
                losses = list(learner.losses(evaluated(learner, examples)))
            found = sum_by_document(losses)
            assert 1 <= sum(isinstance(event, MemoryRanOut) for event in learner.events) <= 2
            assert found.tokens == expected.tokens
            assert found.nats == pytest.approx(expected.nats, rel=1e-5)


def test_after_a_failure_later_steps_start_with_smaller_micro_batches(base, monkeypatch):
    examples = uneven_examples()
    sizes = []

    def watching(micro_batch):
        sizes.append(micro_batch.sizes.tokens)
        return Failing(1) if len(sizes) == 1 else nullcontext()

    accumulate_within(watching, monkeypatch)
    with recovering_learner(base, examples) as learner:
        progress = train(Trainer(learner, RECIPE, learner.events.append, "train"), examples, [])
    whole = sum(example.num_active_tokens for example in examples)
    half = -(-whole // 2)
    cut = [micro_batch.sizes.tokens for micro_batch in learner.limit.cut(outlined(learner, examples))]
    assert sizes == [whole, *cut, *cut]
    assert max(cut) <= half
    assert progress.steps == progress.total_steps == 2
    assert [event for event in learner.events if isinstance(event, MemoryRanOut)] == [MemoryRanOut(4096, half)]
    assert progress.tokens == 2 * sum(LENGTHS)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_out_of_memory_errors_of_all_kinds_are_recognised(error):
    assert ran_out_of_memory(error)


def test_torchs_out_of_memory_error_on_the_cpu_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert ran_out_of_memory(raised.value)


def test_an_error_of_the_clean_up_does_not_hide_an_out_of_memory_error():
    with pytest.raises(RuntimeError, match="capture") as raised:
        try:
            raise torch.OutOfMemoryError
        finally:
            raise RuntimeError("capture invalidated")
    assert ran_out_of_memory(raised.value)
