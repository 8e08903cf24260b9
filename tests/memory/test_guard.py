"""A training stays within its memory: a dry run before the first step shows what fits; exceeding it stops cleanly."""

import json
import random
import re
from contextlib import nullcontext

import pytest
import torch
from builders import FullAdaptation, limit_rows, make_llama, make_sentences, make_step, outlined, schedule_of, train
from command import start
from failing_memory import CPU, RECIPE, Failing, equal, gradients, losses_within, recovering_learner, uneven_examples
from fake_machine import FakeMachine

from sebp_edge.cli.progress import ProgressPrinter
from sebp_edge.engine.memory.guard import STEPS_BETWEEN_CHECKS, MemoryGuard
from sebp_edge.engine.models.adaptation import snapshot, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.learner import Learner
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.errors import BudgetExceeded, MachineError
from sebp_edge.events import MemoryPressure, MemoryProbed, MemoryRanOut, Notice, StepDone, silent
from sebp_edge.machine import devices

pytestmark = pytest.mark.usefixtures("unassessed")

AMPLE = 10**12


def ample():
    return MemoryGuard(CPU, AMPLE, predicted=AMPLE // 2)


# ------------------------------------------------------------------------------------------------------------ dry runs


CASES = {"lora": (RECIPE, False), "padded": (RECIPE, True), "full": (RECIPE.replace(method="full"), False)}


def bits(tensors):
    return [tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "graphs"), [*((case, False) for case in CASES), ("lora", True)])
def test_a_dry_run_changes_nothing_bit_for_bit(base, case, graphs, plain_graphs):
    recipe, padded = CASES[case]
    examples = uneven_examples()

    def steps(learner):
        outcomes = [learner.step(make_step(learner, group), 1e-2) for group in (examples[:5], examples[5:])]
        return [number for outcome in outcomes for number in outcome] + snapshot(learner.adaptation)

    def prepared(learner):
        if graphs and not padded:
            learner.plain.begin_graphs()
        learner.prepare(schedule_of(learner, [[examples[:5], examples[5:]]]))
        return learner

    with recovering_learner(base, examples, recipe, padded=padded) as learner:
        expected = steps(prepared(learner))
    with recovering_learner(base, examples, recipe, padded=padded, limit=ample()) as learner:
        prepared(learner)
        for parameter in trainable(learner.adaptation):
            parameter.data.view(-1)[0] = -0.0
        weights, random = snapshot(learner.adaptation), torch.get_rng_state()
        learner.events.clear()
        learner._largest_dry_run = (0, 0)
        assert learner.fits()
        assert equal(bits(snapshot(learner.adaptation)), bits(weights))
        assert torch.equal(torch.get_rng_state(), random)
        moments = [value for one in learner.plain.update._moments for value in one if value is not None]
        gradients = [parameter.grad for parameter in learner.plain.parameters]
        assert moments
        assert not any(tensor.any() for tensor in (*moments, *gradients, learner.plain._loss))
        # A size that is known to fit gets no second dry run.
        assert learner.fits()
        assert [type(event) for event in learner.events] == [MemoryProbed]
    with recovering_learner(base, examples, recipe, padded=padded, limit=ample()) as learner:
        prepared(learner)
        assert equal(bits(steps(learner)), bits(expected))


@pytest.mark.parametrize(("dtype", "graphs"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_dry_run_updates_nothing_in_the_backward_pass(dtype, graphs, plain_graphs, updated_in_backward):
    examples, events = uneven_examples(), []
    adapted = FullAdaptation(make_llama().to(dtype))
    before = snapshot(adapted)
    recipe = RECIPE.replace(method="full")
    with RecoveringLearner(adapted, recipe, examples, Collator(64, 2), events.append, guard=ample()) as learner:
        if graphs:
            learner.plain.begin_graphs()
        learner.prepare(schedule_of(learner, [[examples]]))
        assert equal(bits(snapshot(adapted)), bits(before))
        moments = [value for one in learner.plain.update._moments for value in one if value is not None]
        assert not any(value.any() for value in moments)
        assert int(learner.plain.update._adamw.step) == 0
        assert all(parameter.grad is None for parameter in adapted.model.parameters())
        # A step does change the weights.
        learner.step(make_step(learner, examples), 1e-2)
        assert not equal(bits(snapshot(adapted)), bits(before))
    assert [type(event) for event in events] == [MemoryProbed]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_that_runs_out_of_memory_is_repeated_with_smaller_micro_batches(base, case, monkeypatch):
    recipe, padded = CASES[case]
    examples = uneven_examples()
    with recovering_learner(base, examples, recipe, padded=padded, limit=ample()) as learner:
        expected = gradients(learner, examples, Failing(), monkeypatch)
        schedule = schedule_of(learner, [[examples]])
        with Failing() as counting:
            learner.prepare(schedule)
        before = snapshot(learner.adaptation)
        (largest,) = learner.limit.cut(outlined(learner, examples))
        for number in (1, random.randint(2, counting.count - 1)):
            limit_rows(learner, 4096)
            learner._largest_dry_run = (0, 0)
            learner.events.clear()
            with Failing(number):
                learner.prepare(schedule)
            ran_out, probed = learner.events
            assert ran_out == MemoryRanOut(4096, -(-largest.sizes.tokens // 2))
            assert probed.rows <= ran_out.max_rows < largest.sizes.tokens
            assert equal(bits(snapshot(learner.adaptation)), bits(before))
            found = gradients(learner, examples, Failing(), monkeypatch)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_steps_of_one_micro_batch_are_cut_before_the_first_step(updated_in_backward, monkeypatch):
    """Updates in the backward pass cannot be undone, so later is too late."""
    examples, events = uneven_examples(), []
    recipe = RECIPE.replace(method="full", epochs=2)
    dry_run = Learner.dry_run

    def failing(self, micro_batch):
        if len(micro_batch.examples) > 2:
            raise torch.OutOfMemoryError
        dry_run(self, micro_batch)

    monkeypatch.setattr(Learner, "dry_run", failing)
    with RecoveringLearner(
        FullAdaptation(make_llama()), recipe, examples, Collator(64, 2), events.append, guard=ample()
    ) as learner:
        progress = train(Trainer(learner, recipe, events.append, "train"), examples, [])
        fewest = len(learner.limit.cut(outlined(learner, examples)))
    assert [type(event) for event in events if not isinstance(event, Notice | StepDone)][-1] is MemoryProbed
    assert any(isinstance(event, MemoryRanOut) for event in events)
    assert progress.steps == progress.total_steps == 2 * fewest > 4


def test_without_a_limit_there_is_no_dry_run(base):
    with recovering_learner(base, uneven_examples()) as learner:
        learner.prepare(schedule_of(learner, [[uneven_examples()]]))
        assert learner.events == []


# ----------------------------------------------------------------------------------------------------- memory on a CPU


def fitting_budget(make, texts):
    """Returns a budget slightly above the plan's peak."""
    return make(memory_budget=AMPLE).plan(texts).chosen.peak + 50_000_000


def weights_of(personalizer):
    return [weight.detach().clone() for weight in personalizer.in_use.load(silent).model.parameters()]


@pytest.mark.slow
def test_a_process_that_exceeds_its_budget_while_training_stops_cleanly_and_saves_the_best_state(make, process_memory):
    texts, events = make_sentences(24, words=30), []
    recipe = RECIPE.replace(learning_rate=2e-2, batch_tokens=100, epochs=9)
    personalizer = make(recipe=recipe, memory_budget=fitting_budget(make, texts))
    before = weights_of(personalizer)

    def grow(event):
        events.append(event)
        if isinstance(event, StepDone) and event.epoch == 3:
            process_memory.used = personalizer.memory_budget.size + 50_000_000

    personalizer.on_event = grow
    with pytest.raises(BudgetExceeded) as raised:
        personalizer.adapt(texts, name="mine")
    message = str(raised.value)
    assert "more than its memory budget of" in message
    assert "The best state so far is saved as version 1 of the adapter 'mine'; it is not active." in message
    assert "\n" not in message
    assert raised.value.exit_code == 1
    last = [event for event in events if isinstance(event, StepDone)][-1]
    assert 3 <= last.epoch < 9
    assert last.step < last.steps
    assert equal(weights_of(personalizer), before)
    assert not any("forward" in vars(module) for module in personalizer.in_use.base.model.modules())


def hold_memory_beside(process_memory, rows, budget, monkeypatch):
    """Makes micro-batches with gradients and more than `rows` rows take the process beyond its budget."""

    def hold(examples):
        is_large = torch.is_grad_enabled() and sum(example.num_active_tokens for example in examples) > rows
        process_memory.used = budget + 50_000_000 if is_large else 0
        return nullcontext()

    losses_within(hold, monkeypatch)


@pytest.mark.slow
def test_micro_batches_that_take_more_than_planned_are_cut_before_the_first_step(make, process_memory, monkeypatch):
    texts, events = make_sentences(24, words=30), []
    budget = fitting_budget(make, texts)
    hold_memory_beside(process_memory, 200, budget, monkeypatch)
    result = make(memory_budget=budget, on_event=events.append).adapt(texts)
    kinds = [type(event) for event in events if not isinstance(event, Notice)]
    first = kinds.index(StepDone)
    assert MemoryRanOut in kinds[:first]
    assert MemoryRanOut not in kinds[first:]
    probed = events[[type(event) for event in events].index(MemoryProbed)]
    assert probed.rows <= 200
    assert probed.allocator_peak is None
    assert probed.predicted == result.predicted_peak_bytes < budget
    # The peak includes the failed dry runs.
    assert result.peak_memory_bytes > budget


@pytest.mark.slow
def test_a_single_example_that_does_not_fit_raises_one_sentence_before_the_first_step(
    make, process_memory, monkeypatch
):
    texts, events = make_sentences(24, words=30), []
    personalizer = make(memory_budget=fitting_budget(make, texts), on_event=events.append)
    before = weights_of(personalizer)
    hold_memory_beside(process_memory, 0, personalizer.memory_budget.size, monkeypatch)
    with pytest.raises(MachineError) as raised:
        personalizer.adapt(texts)
    message = str(raised.value)
    assert "memory before the first step; nothing was saved." in message
    assert "raise the memory budget of" in message
    assert not any(isinstance(event, StepDone) for event in events)
    assert personalizer.store.names() == []
    assert equal(weights_of(personalizer), before)


PROCESS = """
import sys
import torch
from sebp_edge.cli import progress
from sebp_edge.cli.commands import app
torch.set_num_threads(1)
steps, own, taken = [], progress.JsonLines.__call__, []

def growing(sink, event):
    own(sink, event)
    steps.append(event.event)
    if steps.count("step") == 5 and not taken:
        taken.append(torch.ones(250_000_000))

progress.JsonLines.__call__ = growing
app(["adapt", *sys.argv[1:], "--json"])
"""


@pytest.mark.slow
def test_the_command_ends_with_one_sentence_if_the_process_exceeds_its_budget(adapt):
    with start([PROCESS, *adapt[1:], "--epochs", 9, "--device", "cpu", "--memory", "1GB"]) as one:
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 1, errors
    assert errors.startswith("sebp-edge: This process used 1.")
    assert errors.count("\n") == 1
    records = [json.loads(line) for line in output.splitlines()]
    assert [record["event"] for record in records].count("memory_probed") == 1
    assert (records[-1]["event"], records[-1]["error"]) == ("error", "BudgetExceeded")
    assert [record["active"] for record in records if record["event"] == "saved"] == [False]


# ----------------------------------------------------------------------------------------------------- other programs


def set_free_memory(monkeypatch, left):
    """Simulates that other programs leave `left` bytes; really taking them would stop other work on this machine."""
    FakeMachine(monkeypatch).has_memory(left, total=devices.total_memory(CPU))


@pytest.mark.slow
def test_micro_batches_are_cut_before_other_programs_make_memory_run_out(base, monkeypatch):
    examples = uneven_examples()
    with recovering_learner(base, examples) as learner:
        expected = [learner.step(make_step(learner, examples), 1e-3) for _ in range(2 * STEPS_BETWEEN_CHECKS)]
    with recovering_learner(base, examples, limit=ample()) as learner:
        learner.prepare(schedule_of(learner, [[examples]]))
        learner.events.clear()
        (step,), (largest,) = learner.schedule.epochs[0], learner.limit.cut(outlined(learner, examples))
        found = [learner.step(step, 1e-3)]
        assert learner.events == []
        set_free_memory(monkeypatch, 10**6)
        found += [learner.step(step, 1e-3) for _ in range(2 * STEPS_BETWEEN_CHECKS - 1)]
        first, second = learner.events
        assert (first.max_rows_before, first.max_rows) == (4096, -(-largest.sizes.tokens // 2))
        assert second.max_rows < second.max_rows_before == first.max_rows
        assert first.shortfall > 0
    torch.testing.assert_close([each.loss for each in found], [each.loss for each in expected], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_memory_pressure_that_cannot_be_relieved_is_reported_once(base, monkeypatch):
    examples = uneven_examples()[:1]
    with recovering_learner(base, examples, limit=ample()) as learner:
        learner.prepare(schedule_of(learner, [[examples]]))
        learner.events.clear()
        set_free_memory(monkeypatch, 10**6)
        for _ in range(4 * STEPS_BETWEEN_CHECKS):
            learner.step(make_step(learner, examples), 1e-3)
        (event,) = learner.events
        assert isinstance(event, MemoryPressure)
        assert event.max_rows == event.max_rows_before


@pytest.mark.slow
@pytest.mark.usefixtures("process_memory")
def test_a_budget_is_limited_to_the_memory_that_other_programs_leave(make, notes_folder, monkeypatch):
    peak = make(memory_budget=AMPLE).plan(notes_folder).chosen.peak
    set_free_memory(monkeypatch, peak + 10**8)
    events = []
    plan = make(memory_budget=AMPLE).plan(notes_folder)
    assert plan.requested_budget == AMPLE
    assert (plan.chosen.peak, plan.budget) == (peak, peak + 10**8)
    assert make(memory_budget=AMPLE, on_event=events.append).adapt(notes_folder).predicted_peak_bytes < plan.budget
    (notice,) = [event.message for event in events if isinstance(event, Notice)]
    assert notice.startswith("The memory budget is 1000.0 GB, of which other programs leave ")
    # A training that does not fit into that is refused before anything is loaded.
    set_free_memory(monkeypatch, 0)
    with pytest.raises(MachineError, match="of which other programs leave 0 bytes; close other programs") as raised:
        make(memory_budget=AMPLE).adapt(notes_folder)
    assert "raise the budget" not in str(raised.value)


def test_memory_pressure_and_dry_runs_are_printed_in_a_line_each(capsys):
    ProgressPrinter(None)(MemoryProbed(1500, 1_900_000_000, 1_200_000_000, 2_100_000_000))
    ProgressPrinter(None)(MemoryProbed(7, 1_900_000_000, None, None))
    ProgressPrinter(None)(MemoryPressure(300_000_000, 4096, 700))
    out, err = (text.replace("\n", " ") for text in capsys.readouterr())
    assert re.search(r"1\.9 GB with .*\b1,500 tokens.*, predicted 2\.1 GB", out)
    assert re.search(r"1\.9 GB with .*\b7 tokens", out)
    assert re.search(r"0\.3 GB .*; .*at most 700 tokens", err)
