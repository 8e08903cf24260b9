"""Before the first graph is captured, all that is to come is rehearsed: none needs room beside another."""

import gc
import weakref

import pytest
from builders import evaluated, make_examples, step_of
from running_out import CPU, RECIPE, PlainGraphs, learning, odd_examples

from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.texts.batches import pack
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.graphs import MicroBatchGraphs
from sebp_edge.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("plain_graphs")


class Recorded(PlainGraphs):
    def __init__(self, device, on_event):
        super().__init__(device, on_event)
        self.order = []

    def rehearse(self, function):
        self.order.append("rehearse")
        super().rehearse(function)

    def capture(self, part, function):
        self.order.append(part)
        return super().capture(part, function)


@pytest.fixture
def learner(base, monkeypatch):
    """One whose graphs note what is done with them; a step of many examples is micro-batches of several sizes."""
    monkeypatch.setattr("sebp_edge.training.learner.Graphs", Recorded)
    # With a budget the fullest micro-batch is tried out, as it always is on a GPU.
    with learning(base, odd_examples(), max_rows=630, limit=MemoryGuard(CPU, budget=10**12)) as learner:
        learner.learner.begin_graphs()
        yield learner


def test_steps_and_held_out_losses_are_rehearsed_before_one_is_captured(learner):
    examples = make_examples([64] * 40 + [5])
    trainer = Trainer(learner, RECIPE, learner.events.append, "train")
    select, judge = examples[2:4], examples[20:]
    schedule = Schedule([[examples]] * RECIPE.epochs, select, judge)
    learner.prepare(schedule)
    evaluate(learner, schedule.judge)
    trainer.train(schedule)
    order = learner.learner.graphs._graphs.order
    rehearsals = order.count("rehearse")
    assert order[:rehearsals] == ["rehearse"] * rehearsals
    assert order.count("gradients") > 1
    assert order.count("losses") > 1
    # Nothing is rehearsed for nothing.
    assert rehearsals == order.count("gradients") + order.count("losses")


def test_gradients_come_first_and_larger_ones_before_smaller_ones(learner, monkeypatch):
    ran, run = [], MicroBatchGraphs._run
    monkeypatch.setattr(
        MicroBatchGraphs,
        "_run",
        lambda graphs, part, tokens: ran.append((part, len(tokens.input_ids))) or run(graphs, part, tokens),
    )
    examples = odd_examples()
    learner.prepare(Schedule([[examples]], examples[:3]))
    learner.learner.graphs.rehearse(pack(learner.limit.cut(examples)[-1].examples))
    assert ran == sorted(ran, key=lambda each: (each[0], -each[1]))
    assert {part for part, _ in ran} == {"gradients", "losses"}


def test_where_losses_are_asked_for_first_no_gradient_is_taken(learner, monkeypatch):
    examples, taken = odd_examples(), []
    monkeypatch.setattr(MicroBatchGraphs, "_take_gradients", lambda graphs, part, tokens: taken.append(tokens))
    learner._largest_tried = (10**9, 10**9)  # so that nothing is tried out
    learner.prepare(Schedule([[examples]], examples[:3], examples[3:5]))
    evaluate(learner, evaluated(learner, examples[:3]))
    assert not taken
    order = learner.learner.graphs._graphs.order
    assert order.index("losses") == order.count("rehearse") >= 1


def test_graphs_and_what_they_hold_go_at_once(learner):
    examples = odd_examples()
    learner.prepare(Schedule([[examples]], examples[:3]))
    learner.step(step_of(learner, examples), 1e-3)
    evaluate(learner, evaluated(learner, examples[:3]))
    gone = weakref.ref(learner.learner.graphs)
    captured = [weakref.ref(each) for each in learner.learner.graphs._captured.values()]
    for each in learner.learner.graphs._captured.values():
        each._replay = None  # a real graph's does not hold what was captured
    del each
    gc.disable()
    try:
        learner._let_go()
        assert gone() is None
        assert captured
        assert not any(each() for each in captured)
    finally:
        gc.enable()


def test_what_was_not_announced_is_rehearsed_when_it_comes(learner):
    examples = odd_examples()
    learner.prepare(Schedule([[examples[:2]]]))
    learner.step(step_of(learner, examples[:2]), 1e-3)
    before = len(learner.learner.graphs._graphs.order)
    evaluate(learner, evaluated(learner, examples))
    assert learner.learner.graphs._graphs.order[before] == "rehearse"
    assert "losses" in learner.learner.graphs._graphs.order[before:]
