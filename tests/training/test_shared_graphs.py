"""Captured graphs compute what sequences begin with in common once: the gradients are those without sharing."""

import random

import pytest
import torch
from builders import IGNORE, SIZES, evaluated, gpu_sync_forbidden, make_llama, make_step, outlined, schedule_of
from graph_learners import LoraAdaptation, drop_graphs, error, make_learner, step_gradients
from model_families import SLIDING, make_model
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig, Phi3Config, Qwen3Config

from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.values.example import Example

pytestmark = pytest.mark.gpu

FAMILIES = {
    "llama": lambda: make_llama(head_dim=32),
    "qwen3": lambda: make_model(Qwen3Config(**SIZES, head_dim=64)),
    "mistral, with a window within the note": lambda: make_model(MistralConfig(**SIZES, head_dim=32, sliding_window=5)),
    "mistral, with a window beyond the note": lambda: make_model(
        MistralConfig(**SIZES, head_dim=32, sliding_window=48)
    ),
    "gemma3": lambda: make_model(Gemma3TextConfig(**SIZES, head_dim=256, **SLIDING)),
}


def questions(seed, notes=(40, 17), each=4, alone=2):
    """Examples that begin with one of the notes, of these lengths, and have a loss on their last tokens."""
    draw = random.Random(seed)
    texts = [[draw.randrange(3, 320) for _ in range(length)] for length in notes]
    made = [text + [draw.randrange(3, 320) for _ in range(draw.randint(3, 12))] for text in texts for _ in range(each)]
    made += [[draw.randrange(3, 320) for _ in range(draw.randint(5, 30))] for _ in range(alone)]
    draw.shuffle(made)
    return [Example(ids, [IGNORE] * (len(ids) - 2) + ids[-2:], number) for number, ids in enumerate(made)]


def gradients(learner, examples):
    """The loss and the gradients of one micro-batch."""
    return step_gradients(learner, [examples])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_without_sharing(family):
    examples = questions(0)
    adapted = LoraAdaptation(FAMILIES[family]())
    with make_learner(adapted, examples) as learner:
        learner.lay_out(schedule_of(learner, [[examples]]))
        assert learner.row_losses.shares_prefixes
        assert learner.row_losses.pack(outlined(learner, examples)).prefixes is not None
        loss, found = gradients(learner, examples)
        _, again = gradients(learner, examples)
        assert learner.plain.graphs is not None
        assert error(again, found) <= 1e-6
        learner.row_losses.shares_prefixes = False
        unshared_loss, unshared = gradients(drop_graphs(learner), examples)
    adapted.model.to(torch.float32)
    with make_learner(adapted, examples) as learner:
        assert not learner.row_losses.shares_prefixes
        true_loss, truth = gradients(drop_graphs(learner), examples)
    assert abs(loss - true_loss) <= 2 * abs(unshared_loss - true_loss) + 1e-2
    assert error(found, truth) <= 2 * error(unshared, truth) + 1e-4


def test_one_graph_computes_other_trees_of_its_bucket():
    trees = [questions(1), questions(2, (25, 25, 7), 3, 0), questions(3, (33,), 6, 3)]
    examples = [example for tree in trees for example in tree]
    adapted = LoraAdaptation(FAMILIES["llama"]())
    with make_learner(adapted, examples) as learner:
        # One bucket that holds all of them.
        packed = [learner.row_losses.pack(outlined(learner, tree)) for tree in trees]
        bucket = Bucket(*map(max, zip(*(tokens.sizes for tokens in packed), strict=True)))
        learner.plain.graphs.prepare([(bucket, True)])
        found = [gradients(learner, tree)[1] for tree in trees]
        assert len(learner.plain.graphs._captured) == 1
        learner.row_losses.shares_prefixes = False
        unshared = [gradients(drop_graphs(learner), tree)[1] for tree in trees]
    adapted.model.to(torch.float32)
    with make_learner(adapted, examples) as learner:
        truths = [gradients(drop_graphs(learner), tree)[1] for tree in trees]
    assert all(tokens.prefixes is not None for tokens in packed)
    for shared, alone, truth in zip(found, unshared, truths, strict=True):
        assert error(shared, truth) <= 2 * error(alone, truth) + 1e-4


def test_held_out_losses_keep_their_order():
    examples = questions(4)
    with make_learner(LoraAdaptation(FAMILIES["llama"]()), examples) as learner:
        ((outlines, losses, owners),) = learner.losses(evaluated(learner, examples))
        assert learner.plain.graphs is not None
        assert {key.has_prefixes for key in learner.plain.graphs._captured} == {True}
        learner.row_losses.shares_prefixes = False
        ((others, expected, expected_owners),) = drop_graphs(learner).losses(evaluated(learner, examples))
    assert outlines == others
    assert torch.equal(owners, expected_owners)
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


def test_steps_with_prefixes_do_not_wait_for_the_gpu():
    examples = questions(5)
    with make_learner(LoraAdaptation(FAMILIES["llama"]()), examples) as learner:
        outcome = learner.step(make_step(learner, examples), 1e-3)
        with gpu_sync_forbidden():
            again = learner.step(make_step(learner, examples), 1e-3)
        assert learner.plain.graphs is not None
    assert float(again.loss) < float(outcome.loss)


NOT_TAKEN = {
    "softcap": lambda: make_model(
        Gemma2Config(**SIZES, head_dim=32, sliding_window=24, attn_logit_softcapping=0.7), "eager"
    ),
    "heads of 8": make_llama,
    "blocks that are not replaced": lambda: make_model(Phi3Config(**SIZES | {"hidden_size": 128})),
    "dropout": lambda: make_llama(head_dim=32, attention_dropout=0.1),
}


@pytest.mark.parametrize("reason", NOT_TAKEN)
def test_what_the_kernels_do_not_take_shares_nothing(reason):
    examples = questions(6)
    with make_learner(LoraAdaptation(NOT_TAKEN[reason]()), examples) as learner:
        assert learner.row_losses.hoisted is not None
        assert not learner.row_losses.shares_prefixes
        assert learner.row_losses.pack(outlined(learner, examples)).prefixes is None
