"""What sequences begin with in common is computed once: losses and gradients stay those of the padded batch."""

import random
from itertools import pairwise

import pytest
import torch
from builders import make_llama
from model_families import DECODERS, make_decoder

from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.rows.beginnings import MIN_TOKENS, num_shared_tokens
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.sparse.rows.shared_prefixes import share_prefixes
from sebp_edge.texts.batches import pack
from sebp_edge.texts.examples import Example


def example(ids, without_loss):
    return Example(ids, [IGNORE] * without_loss + list(ids[without_loss:]), 0)


def examples_of(draw, shapes):
    """Examples that begin with one of two prefixes or none, as (prefix, own tokens, tokens without loss)."""
    prefixes = [[draw.randrange(1, 60) for _ in range(length)] for length in (11, 9)]
    made = []
    for prefix, own, extra in shapes:
        ids = ([] if prefix is None else prefixes[prefix]) + [draw.randrange(60, 120) for _ in range(own)]
        made.append(example(ids, min(len(ids) - 1, (0 if prefix is None else len(prefixes[prefix])) + extra)))
    return made


SHAPES = {
    "two alike": [(0, 5, 0), (0, 3, 1)],
    "one alone": [(0, 5, 0), (None, 20, 3)],
    "two groups": [(0, 7, 2), (1, 4, 0), (None, 9, 0), (0, 2, 1), (1, 30, 3), (1, 1, 0)],
    "mostly loss": [(0, 5, -6), (0, 4, 0), (0, 9, -1)],
    "equal": [(0, 1, 0)] * 2,
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_reads_what_it_read_before(shapes, seed):
    tokens = pack(examples_of(random.Random(seed), shapes))
    shared = share_prefixes(tokens)
    begins, continues = shared.cu_seqlens.tolist(), [] if shared.continues is None else shared.continues.tolist()
    rows = [list(range(begin, end)) for begin, end in pairwise(begins)]
    read = [(rows[at] if at >= 0 else []) + own for at, own in zip(continues, rows, strict=True)] if continues else rows
    first_own = sum(at >= 0 for at in continues) and len(rows) - (len(tokens.cu_seqlens) - 1)
    before = [tokens.input_ids[begin:end].tolist() for begin, end in pairwise(tokens.cu_seqlens.tolist())]
    assert [shared.input_ids[at].tolist() for at in read[first_own:]] == before
    assert all(shared.position_ids[at].tolist() == list(range(len(at))) for at in read)
    assert shared.input_ids[shared.loss_indices].tolist() == tokens.input_ids[tokens.loss_indices].tolist()
    assert (shared.loss_indices.diff() > 0).all()
    for name in ("targets", "sequences", "weights"):
        assert torch.equal(getattr(shared, name), getattr(tokens, name))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_saved_rows_are_counted_without_packing(shapes):
    examples = examples_of(random.Random(0), shapes)
    tokens = pack(examples)
    saved = len(tokens.input_ids) - len(share_prefixes(tokens).input_ids)
    assert num_shared_tokens([one.input_ids[: one.num_tokens_before_loss] for one in examples]) == saved


def test_only_what_is_long_and_has_no_loss_is_shared():
    prefix = list(range(1, MIN_TOKENS + 1))
    alike = [example([*prefix, 70, 71, 72], MIN_TOKENS + 1) for _ in range(3)]
    assert len(share_prefixes(pack(alike)).input_ids) < len(pack(alike).input_ids)
    with_loss = [example(one.input_ids, MIN_TOKENS - 1) for one in alike]
    short = [example([*prefix[1:], 70 + number, 71, 72], MIN_TOKENS) for number in range(3)]
    for examples in (with_loss, short, alike[:1], [*alike[:1], example([5, *prefix, 70], MIN_TOKENS)]):
        tokens = pack(examples)
        assert share_prefixes(tokens) is tokens


def test_rows_are_saved():
    prefix = list(range(1, 23))
    tokens = pack([example([*prefix, 30 + number, 40 + number, 50 + number, 60], 24) for number in range(10)])
    assert len(tokens.input_ids) == 250
    assert len(share_prefixes(tokens).input_ids) == 22 + 10 * 3


@pytest.mark.parametrize("family", sorted(DECODERS.keys() - {"recurrent-gemma", "xlstm", "opt", "phi"}))
def test_losses_and_gradients_are_those_without_sharing(family):
    model = make_decoder(family)
    examples = examples_of(random.Random(1), SHAPES["two groups"])
    with Hoisted(model) as hoisted:
        found = []
        for tokens in (pack(examples), share_prefixes(pack(examples))):
            model.zero_grad()
            losses = hoisted.row_losses(tokens)
            losses.sum().backward()
            found.append([losses.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for expected, shared in zip(*found, strict=True):
        assert (shared - expected).norm() <= 1e-5 * expected.norm()  # the loss is computed in fp32


def test_a_prefix_can_be_forgotten_by_no_sequence():
    """A change of the shared tokens changes every sequence that continues them, and no other."""
    model = make_llama()
    shapes = [(0, 4, 0), (0, 6, 0), (None, 12, 0)]
    examples = examples_of(random.Random(0), shapes)
    other = [example([3, *one.input_ids[1:]], one.labels.index(one.input_ids[-1])) for one in examples[:2]]
    with Hoisted(model) as hoisted, torch.no_grad():
        tokens, changed = share_prefixes(pack(examples)), share_prefixes(pack([*other, examples[2]]))
        assert tokens.continues.tolist() == changed.continues.tolist() == [-1, 0, 0, -1]
        before, after = hoisted.row_losses(tokens), hoisted.row_losses(changed)
    torch.testing.assert_close(after[changed.sequences == 2], before[tokens.sequences == 2])
    assert (after[changed.sequences < 2][-1] - before[tokens.sequences < 2][-1]).abs() > 1e-6
