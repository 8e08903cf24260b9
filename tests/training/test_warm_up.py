"""All planned buckets are warmed up before the first capture, so that no warm-up needs memory besides a graph."""

import gc
import weakref

import pytest
import torch
from builders import IGNORE, evaluated, make_examples, make_step, outlined, schedule_of
from failing_memory import CPU, RECIPE, recovering_learner, uneven_examples

from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.models.adaptation import snapshot
from sebp_edge.engine.training.evaluation import evaluate
from sebp_edge.engine.training.graphs import MicroBatchGraphs
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.events import MemoryProbed
from sebp_edge.values.example import Example

pytestmark = pytest.mark.usefixtures("plain_graphs", "free_captures")


MANY, SHORT, LONG = make_examples([64] * 40 + [5]), make_examples([8, 8]), make_examples([40, 40])


@pytest.fixture
def learner(base, plain_graphs):
    """A learner with recorded graphs; a step of many examples has micro-batches of several sizes."""
    examples = [*uneven_examples(), *MANY, *SHORT, *LONG]
    # With a budget there is a dry run of the largest micro-batch, as always on a GPU.
    with recovering_learner(base, examples, max_rows=630, limit=MemoryGuard(CPU, budget=10**12)) as learner:
        learner.plain.begin_graphs()
        yield learner


@pytest.mark.slow
def test_steps_and_held_out_losses_are_warmed_up_before_the_first_capture(learner):
    examples = MANY
    trainer = Trainer(learner, RECIPE, learner.events.append, "train")
    validation, test = examples[2:4], examples[20:]
    schedule = schedule_of(learner, [[examples]] * RECIPE.epochs, validation, test)
    learner.prepare(schedule)
    evaluate(learner, schedule.test)
    trainer.train(schedule)
    order = learner.plain.graphs._graphs.order
    num_warm_ups = order.count("warm_up")
    assert order[:num_warm_ups] == ["warm_up"] * num_warm_ups
    assert order.count("gradients") > 1
    assert order.count("losses") > 1
    # Every warm-up is followed by a capture.
    assert num_warm_ups == order.count("gradients") + order.count("losses")


@pytest.mark.slow
def test_later_trainings_share_graphs_that_were_warmed_up_before_the_first_capture(learner):
    """A warm-up after a capture would need memory in addition to that graph's."""
    examples = MANY
    first = schedule_of(learner, [[examples[:20]]] * RECIPE.epochs, examples[20:23], examples[23:30])
    last = schedule_of(learner, [[examples]] * RECIPE.epochs, test=examples[20:23], trains_on_all=True)
    learner.prepare(first, [last])
    fresh = snapshot(learner.adaptation)
    evaluate(learner, first.test)
    Trainer(learner, RECIPE, learner.events.append, "train").train(first)
    order = learner.plain.graphs._graphs.order
    num_warm_ups, keys = order.count("warm_up"), set(learner.plain.graphs._planned)
    learner.plain.start_again(fresh)
    learner.prepare(last)
    Trainer(learner, RECIPE, learner.events.append, "all documents").train(last)
    evaluate(learner, last.test)
    assert learner.plain.graphs._planned == keys
    assert order.count("warm_up") == num_warm_ups
    assert order[:num_warm_ups] == ["warm_up"] * num_warm_ups
    assert order.count("gradients") > 1


def test_the_dry_run_is_of_the_largest_micro_batch_of_all_trainings(learner):
    small, large = (schedule_of(learner, [[examples]]) for examples in (SHORT, LONG))
    learner.prepare(small, [large])
    (probed,) = [event for event in learner.events if isinstance(event, MemoryProbed)]
    assert probed.rows >= 2 * 39
    learner.prepare(large)
    assert [event for event in learner.events if isinstance(event, MemoryProbed)] == [probed]


@pytest.fixture
def ran(monkeypatch):
    """The parts of graphs that run, and their rows."""
    found, run = [], MicroBatchGraphs._run
    monkeypatch.setattr(
        MicroBatchGraphs,
        "_run",
        lambda graphs, part, tokens: found.append((part, len(tokens.input_ids))) or run(graphs, part, tokens),
    )
    return found


def test_gradients_are_warmed_up_before_losses_and_the_largest_first(learner, ran):
    examples = uneven_examples()
    learner.prepare(schedule_of(learner, [[examples]], examples[:3]))
    learner.plain.graphs.capture(learner.row_losses.pack(learner.limit.cut(outlined(learner, examples))[-1].examples))
    assert ran == sorted(ran, key=lambda each: (each[0], -each[1]))
    assert {part for part, _ in ran} == {"gradients", "losses"}


def test_micro_batches_with_prefixes_and_without_are_warmed_up_before_the_first_capture(base, plain_graphs):
    note, *questions = (one.input_ids for one in make_examples([30, 5, 6, 8]))
    about_it = [Example([*note, *own], [IGNORE] * 33 + list(own[3:]), 0) for own in questions]
    steps = [about_it, SHORT]
    with recovering_learner(base, [*about_it, *SHORT]) as learner:
        learner.plain.begin_graphs()
        learner.prepare(schedule_of(learner, [steps], about_it, SHORT))
        for examples in steps:
            learner.step(make_step(learner, examples), 0.0)
            ((outlines, *captured),) = learner.losses(evaluated(learner, examples))
            shared = learner.row_losses(outlines)
            learner.row_losses.shares_prefixes = False
            expected, expected_owners = learner.row_losses(outlines)
            learner.row_losses.shares_prefixes = True
            for losses, owners in (captured, shared):
                assert torch.equal(owners, expected_owners)
                torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        order, keys = learner.plain.graphs._graphs.order, learner.plain.graphs._captured.keys()
    assert order[:4] == ["warm_up"] * 4 and order.count("warm_up") == len(keys) == 4
    assert {(key.has_gradients, key.has_prefixes) for key in keys} == {(a, b) for a in (0, 1) for b in (0, 1)}


def test_gradients_are_warmed_up_first_where_new_graphs_begin_with_an_evaluation(learner, ran):
    """After an evaluation has run out of memory, a step's warm-up beside its graphs would, too."""
    examples = uneven_examples()
    learner._largest_dry_run = (10**9, 10**9)  # so that there is no dry run
    learner.prepare(schedule_of(learner, [[examples]], examples[:3], examples[3:5]))
    evaluate(learner, evaluated(learner, examples[:3]))
    learner.step(make_step(learner, examples), 1e-3)
    assert [part for part, _ in ran] == ["gradients", *["losses"] * (len(ran) - 2), "gradients"]
    order = learner.plain.graphs._graphs.order
    assert order[: order.count("warm_up")] == ["warm_up"] * order.count("warm_up")
    assert order.count("gradients") == 1


def test_graphs_and_their_memory_are_freed_at_once(learner):
    examples = uneven_examples()
    learner.prepare(schedule_of(learner, [[examples]], examples[:3]))
    learner.step(make_step(learner, examples), 1e-3)
    evaluate(learner, evaluated(learner, examples[:3]))
    graphs = weakref.ref(learner.plain.graphs)
    captured = [weakref.ref(each) for each in learner.plain.graphs._captured.values()]
    for each in learner.plain.graphs._captured.values():
        each.replay = None  # A real graph's replay does not hold the captured function.
    del each
    gc.disable()
    try:
        learner.plain.release_graphs()
        assert graphs() is None
        assert captured
        assert not any(each() for each in captured)
    finally:
        gc.enable()


def test_unplanned_buckets_are_warmed_up_on_first_use(learner):
    examples = uneven_examples()
    learner.prepare(schedule_of(learner, [[examples[:2]]]))
    learner.step(make_step(learner, examples[:2]), 1e-3)
    before = len(learner.plain.graphs._graphs.order)
    evaluate(learner, evaluated(learner, examples))
    assert learner.plain.graphs._graphs.order[before] == "warm_up"
    assert "losses" in learner.plain.graphs._graphs.order[before:]
