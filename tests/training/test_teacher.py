"""A teacher's tokens stand for its probabilities, and learning them is the cross-entropy with their shares."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from builders import IGNORE, disturb, evaluated, make_examples, make_llama, make_step, refuse_hoisting, schedule_of
from failing_memory import CPU, RECIPE, Failing, gradients, recovering_learner, uneven_examples
from graph_learners import LoraAdaptation, drop_graphs, error, make_learner, step_gradients
from model_families import MODELS
from pairwise import pairwise
from teachers import dense_losses, distributions, taught

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.sparse.rows.batches import Collator, pack
from sebp_edge.engine.training import teacher as teachers_module
from sebp_edge.engine.training.teacher import NUM_DRAWN, K, tokens_and_shares, with_teacher
from sebp_edge.errors import OptionError
from sebp_edge.events import ExamplesEvaluated, silent
from sebp_edge.values.example import Example

VOCABULARY = 320
COLLATOR = Collator(64, 2)
EXAMPLES = uneven_examples()
# Some examples have a teacher, of many tokens or few.
KS = [20, 0, 3, 20, 0, 20, 1, 20]


@torch.no_grad()
def top_tokens(model, example, k):
    """The k most probable tokens of each loss token and their probabilities, from all logits."""
    labels = torch.tensor(example.labels)[1:]
    logits = model(torch.tensor([list(example.input_ids)]), use_cache=False).logits[0, :-1][labels != IGNORE]
    probabilities, ids = logits.double().softmax(1).topk(k, dim=1)
    return ids, probabilities


def assert_taught(found, expected_ids, expected_shares, k):
    """The k most probable tokens have their probabilities, and drawn ones share the rest equally."""
    all_ids = torch.tensor(found.teacher.ids).view(-1, k + NUM_DRAWN).long()
    all_shares = torch.tensor(found.teacher.shares).view(-1, k + NUM_DRAWN).double()
    ids, shares, drawn = all_ids[:, :k], all_shares[:, :k], all_shares[:, k:]
    torch.testing.assert_close(shares, expected_shares, rtol=1e-4, atol=1e-6)
    rest = (1 - expected_shares.sum(1, keepdim=True)) / NUM_DRAWN
    torch.testing.assert_close(drawn, rest.expand_as(drawn), rtol=1e-4, atol=1e-6)
    assert not (all_ids[:, k:, None] == ids[:, None]).any()
    # Tokens that are nearly as probable may change places.
    same = ids == expected_ids
    assert same.double().mean() > 0.99 if same.numel() else len(ids) == 0


@pairwise(path=["hoisted", "padded"], k=[1, 2, 20], family=["llama", "gemma2", "qwen3"])
def test_the_most_probable_tokens_are_those_of_all_logits(family, k, path):
    model = MODELS[family]().eval()
    expected = [top_tokens(model, example, k) for example in EXAMPLES]
    if path == "padded":
        refuse_hoisting(model)
    found = with_teacher(model, EXAMPLES, COLLATOR, CPU, silent, k=k)
    for example, own, pair in zip(EXAMPLES, found, expected, strict=True):
        assert replace(own, teacher=None) == example
        assert_taught(own, *pair, k)


@pytest.mark.parametrize(
    "examples",
    [
        [],
        [Example([5, 6], [IGNORE, 6], 0)],
        [Example([5, 6, 7], [IGNORE] * 3, 0)],
        [Example([5, 6, 7], [IGNORE] * 3, 0), Example([5, 6, 7], [IGNORE, 6, IGNORE], 1)],
        [EXAMPLES[0]] * 2,
    ],
    ids=["none", "one loss token", "no loss token", "some loss tokens", "one example twice"],
)
def test_strange_examples_are_taught(examples):
    found = with_teacher(make_llama().eval(), examples, COLLATOR, CPU, silent, k=5)
    assert [replace(own, teacher=None) for own in found] == examples
    for own in found:
        assert (own.teacher is None) == (own.num_loss_tokens == 0)


def test_a_small_vocabulary_is_taught_whole():
    model = make_llama(vocab_size=11).eval()
    example = Example([5, 6, 7, 3], [IGNORE, 6, 7, 3], 0)
    (found,) = with_teacher(model, [example], COLLATOR, CPU, silent, k=20)
    assert found.teacher.k == 11
    assert sorted(found.teacher.ids) == sorted([*range(11)] * 3)


def test_a_teacher_of_no_tokens_is_refused():
    with pytest.raises(OptionError, match="k=0"):
        with_teacher(None, EXAMPLES, COLLATOR, CPU, silent, k=0)


@pytest.mark.slow
def test_with_its_adapter_disabled_a_model_teaches_as_the_base_model(base):
    expected = with_teacher(base.model, EXAMPLES, COLLATOR, CPU, silent)
    adaptation = disturb(attach(base, RECIPE, 0), 0.05)
    with adaptation.disabled():
        found = with_teacher(adaptation.model, EXAMPLES, COLLATOR, CPU, silent)
    adapted = with_teacher(adaptation.model, EXAMPLES, COLLATOR, CPU, silent)
    for one, other, third in zip(found, expected, adapted, strict=True):
        assert one.teacher.ids == other.teacher.ids
        assert list(one.teacher.shares) == pytest.approx(list(other.teacher.shares), rel=1e-4)
        assert one.teacher != third.teacher
    assert all(parameter.requires_grad for parameter in trainable(adaptation))


def test_progress_is_reported_and_a_check_can_stop_it(small_evaluations, monkeypatch):
    model, events, checks = make_llama().eval(), [], []
    found = with_teacher(model, EXAMPLES, COLLATOR, CPU, events.append, lambda: checks.append(None))
    assert {type(event) for event in events} == {ExamplesEvaluated}
    assert len(checks) > len(events)  # within micro-batches too
    assert events[-1].done == events[-1].examples == len(EXAMPLES) and len(checks) > 2

    def stop():
        raise StopRequested

    with pytest.raises(StopRequested):
        with_teacher(model, EXAMPLES, COLLATOR, CPU, silent, stop)
    assert not any("forward" in vars(module) for module in model.modules())
    # Cut differently, the teacher is the same.
    monkeypatch.undo()
    for own, other in zip(found, with_teacher(model, EXAMPLES, COLLATOR, CPU, silent), strict=True):
        assert list(own.teacher.shares) == pytest.approx(list(other.teacher.shares), rel=1e-4)


def test_it_continues_with_smaller_micro_batches_if_memory_runs_out(monkeypatch):
    model = make_llama().eval()
    expected, sizes = with_teacher(model, EXAMPLES, COLLATOR, CPU, silent), []
    inner = teachers_module.RowLosses.row_logits

    def failing(self, examples):
        sizes.append(len(examples))
        with Failing(100) if len(sizes) <= 2 else nullcontext():
            return list(inner(self, examples))

    monkeypatch.setattr(teachers_module.RowLosses, "row_logits", failing)
    found = with_teacher(model, EXAMPLES, COLLATOR, CPU, silent)
    assert sizes[0] == len(EXAMPLES) > max(sizes[2:]) and sum(sizes[2:]) == len(EXAMPLES)
    for own, other in zip(found, expected, strict=True):
        # Which tokens are drawn depends on the micro-batch.
        same = [
            one == another or number % other.teacher.k >= K
            for number, (one, another) in enumerate(zip(own.teacher.ids, other.teacher.ids, strict=True))
        ]
        assert all(same)
        assert list(own.teacher.shares) == pytest.approx(list(other.teacher.shares), rel=1e-4)


@pytest.mark.slow
def test_drawn_tokens_stand_for_the_whole_distribution():
    logits = torch.randn(1, 300).expand(80_000, -1)
    ids, shares = tokens_and_shares(logits, 5)
    found = torch.zeros(300).index_add_(0, ids.flatten(), shares.flatten()) / len(ids)
    torch.testing.assert_close(found, logits[0].softmax(0), rtol=0.1, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize(("path", "method"), [("hoisted", "full"), ("padded", "lora"), ("graphs", "lora")])
def test_a_model_has_nothing_to_learn_of_itself(base, path, method, monkeypatch):
    recipe = RECIPE.replace(method=method, learning_rate=1e-3)
    with recovering_learner(base, EXAMPLES, recipe) as learner:
        learner.plain.remove()
        own = with_teacher(learner.adaptation.model, EXAMPLES, COLLATOR, CPU, silent, k=VOCABULARY)
    # The same adaptation again.
    with recovering_learner(base, [*EXAMPLES, *own], recipe, padded=path == "padded") as learner:
        if path == "graphs":
            learner.plain.begin_graphs()
        loss, *found = gradients(learner, own, nullcontext(), monkeypatch)
        _, *hard = gradients(learner, EXAMPLES, nullcontext(), monkeypatch)
    shares = torch.tensor([share for example in own for share in example.teacher.shares]).double()
    entropy = -(shares * shares.log()).sum() * VOCABULARY / len(shares)
    assert float(loss) == pytest.approx(float(entropy), rel=1e-5)
    size = sum(float(gradient.norm()) for gradient in hard)
    assert sum(float(gradient.norm()) for gradient in found) < 1e-4 * size


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize(("path", "max_rows"), [("hoisted", 64), ("hoisted", 4096), ("padded", 100), ("graphs", 64)])
def test_however_micro_batches_are_cut_a_step_is_the_dense_one(base, path, max_rows, monkeypatch):
    examples = taught(EXAMPLES, KS)
    with recovering_learner(base, examples, max_rows=max_rows, padded=path == "padded") as learner:
        if path == "graphs":
            learner.plain.begin_graphs()
            learner.lay_out(schedule_of(learner, [[examples]]))
        loss, *found = gradients(learner, examples, nullcontext(), monkeypatch)
        held_out = torch.cat([each[1] for each in learner.losses(evaluated(learner, examples))])
        learner.plain.remove()
        losses = dense_losses(learner.adaptation.model, examples)
        mean = float(losses.detach().mean())
        expected = torch.autograd.grad(losses.mean(), trainable(learner.adaptation))
    assert float(loss) == pytest.approx(mean, rel=1e-5)
    assert float(held_out.mean()) == pytest.approx(mean, rel=1e-5)
    assert error(found, expected) < 1e-4


@pytest.mark.usefixtures("plain_graphs")
def test_micro_batches_without_a_teacher_have_the_graphs_that_they_had(base):
    soft, hard = taught(EXAMPLES[:3], [20, 20, 0]), EXAMPLES[3:]
    with recovering_learner(base, [*soft, *hard]) as learner:
        learner.plain.begin_graphs()
        graphs = learner.plain.graphs
        learner.lay_out(schedule_of(learner, [[hard]]))
        graphs.accumulate(pack(hard), 1)
        assert (
            {key.num_soft_targets for key in graphs._captured}
            == {key.num_soft_targets for key in graphs._planned}
            == {0}
        )
        (before,) = graphs._captured.values()
        learner.lay_out(schedule_of(learner, [[soft, hard]]))
        assert {key.num_soft_targets for key in graphs._planned} == {0, 19}
        graphs.accumulate(pack(soft), 1)
        graphs.accumulate(pack(hard), 1)
        key = next(key for key in graphs._captured if key.num_soft_targets == 0)
        assert graphs._captured[key] is before and len(graphs._captured) == 2


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(base):
    teacher = with_teacher(make_llama(initializer_range=0.1).eval(), EXAMPLES, COLLATOR, CPU, silent)
    with recovering_learner(base, teacher, RECIPE.replace(method="full")) as learner:
        step = make_step(learner, teacher)
        losses = [float(learner.step(step, 1e-2).loss) for _ in range(20)]
        learner.plain.remove()
        mean = dense_losses(learner.adaptation.model, teacher).mean().item()
    entropy = sum(-(wanted * wanted.clamp(min=1e-30).log()).sum().item() for wanted in map(whole, teacher))
    entropy /= sum(example.num_loss_tokens for example in teacher)
    assert mean < losses[-1] < losses[0]
    assert mean - entropy < 0.8 * (losses[0] - entropy)


def whole(example):
    return distributions(example, VOCABULARY)


class TestOnAGpu:
    """Captured steps on teachers give the eager results."""

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize(
        "options",
        [MemoryOptions(), MemoryOptions(checkpoints=2, offload=True, chunked_blocks=True, small_buffers=True)],
        ids=["fastest", "least memory"],
    )
    def test_captured_gradients_are_the_eager_ones(self, options):
        examples = taught(make_examples([31, 2, 17, 64, 5, 40], prompt=3), [20, 0, 20, 20, 0, 0])
        micro_batches = [examples[:3], examples[3:4], examples[4:]]
        adapted = LoraAdaptation()
        with make_learner(adapted, examples, options=options) as learner:
            learner.lay_out(schedule_of(learner, [micro_batches]))
            loss, found = step_gradients(learner, micro_batches)
            again_loss, again = step_gradients(learner, micro_batches[::-1])
            captured = {key.num_soft_targets for key in learner.plain.graphs._captured}
            eager_loss, eager = step_gradients(drop_graphs(learner), micro_batches)
        assert captured == {0, 19}
        adapted.model.to(torch.float32)
        with make_learner(adapted, examples) as learner:
            true_loss, truth = step_gradients(drop_graphs(learner), micro_batches)
        assert abs(loss - true_loss) <= 2 * abs(eager_loss - true_loss) + 1e-2
        assert again_loss == pytest.approx(loss, rel=1e-5)
        assert error(found, truth) <= 2 * error(eager, truth) + 1e-4
        assert error(again, truth) <= 2 * error(eager, truth) + 1e-4

    def test_each_replay_reads_its_own_teacher(self):
        one, other = (taught(make_examples([31, 17], prompt=3), [20, 20], vocabulary=size) for size in (320, 100))
        with make_learner(LoraAdaptation(), [*one, *other]) as learner:
            found = [[each[1] for each in learner.losses(evaluated(learner, each))] for each in (one, other, one)]
            drop_graphs(learner)
            eager = [[each[1] for each in learner.losses(evaluated(learner, each))] for each in (one, other)]
        assert torch.equal(found[0][0], found[2][0])
        for captured, expected in zip(found, eager, strict=False):
            torch.testing.assert_close(captured[0], expected[0], rtol=2e-2, atol=2e-2)
        assert not torch.allclose(found[0][0], found[1][0], rtol=1e-3, atol=1e-3)
