"""What sequences begin with in common is computed once: losses and gradients stay those of the padded batch."""

import random
from itertools import pairwise

import pytest
import torch
from builders import IGNORE, make_llama
from model_families import DECODERS, make_decoder

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.batches import pack
from sebp_edge.engine.sparse.rows.beginnings import GROUP_TOKENS, MAX_LENGTH_GPU, shared_beginnings, sizes_when_shared
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.engine.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.values.example import Example


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
    shared = share_beginnings(tokens)
    before = [tokens.input_ids[begin:end].tolist() for begin, end in pairwise(tokens.cu_seqlens.tolist())]
    bounds = list(pairwise(shared.cu_seqlens.tolist()))
    prefixes = [range(0)] * len(bounds)
    if shared.prefixes is not None:
        parts = zip(shared.prefixes.begins.tolist(), shared.prefixes.lengths.tolist(), strict=True)
        prefixes = [range(begin, begin + length) for begin, length in parts]
    read = [[*prefix, *range(begin, end)] for prefix, (begin, end) in zip(prefixes, bounds, strict=True)]
    of_sequences = shared.loss_indices[torch.searchsorted(shared.sequences, torch.arange(len(before)))].tolist()
    own = [next(at for at, (begin, end) in enumerate(bounds) if begin <= row < end) for row in of_sequences]
    assert [shared.input_ids[read[at]].tolist() for at in own] == before
    assert all(shared.position_ids[at].tolist() == list(range(len(at))) for at in read)
    assert shared.input_ids[shared.loss_indices].tolist() == tokens.input_ids[tokens.loss_indices].tolist()
    assert len(set(shared.loss_indices.tolist())) == len(tokens.loss_indices)
    assert shared.max_len == max(end - begin for begin, end in bounds)
    if shared.prefixes is not None:
        readers = [
            [end for other, (_, end) in zip(prefixes, bounds, strict=True) if other.start == begin and other]
            for begin, _ in bounds
        ]
        ends = [max([end, *of_readers]) for (_, end), of_readers in zip(bounds, readers, strict=True)]
        assert shared.prefixes.readers_end.tolist() == ends
        assert shared.prefixes.positions.tolist() == shared.position_ids.tolist()
    for name in ("targets", "sequences", "weights"):
        assert torch.equal(getattr(shared, name), getattr(tokens, name))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_sizes_are_known_without_packing(shapes, on_gpu):
    examples = examples_of(random.Random(0), shapes)
    tokens = pack(examples)
    lengths = [one.num_active_tokens for one in examples]
    groups = shared_beginnings(
        [one.input_ids[: one.num_tokens_before_loss + 1] for one in examples], lengths, on_gpu=on_gpu
    )
    assert sizes_when_shared(tokens.sizes, groups, lengths) == share_beginnings(tokens, on_gpu=on_gpu).sizes


def test_only_what_is_long_and_has_no_loss_is_shared():
    prefix = list(range(1, GROUP_TOKENS + 2))
    alike = [example([*prefix, 70, 71, 72], GROUP_TOKENS + 2) for _ in range(2)]
    assert len(share_beginnings(pack(alike)).input_ids) == len(pack(alike).input_ids) - len(prefix)
    with_loss = [example(one.input_ids, GROUP_TOKENS) for one in alike]
    short = [example([*prefix[1:], 70 + number, 71, 72], GROUP_TOKENS) for number in range(2)]
    for examples in (with_loss, short, alike[:1], [*alike[:1], example([5, *prefix, 70], GROUP_TOKENS)]):
        tokens = pack(examples)
        assert share_beginnings(tokens) is tokens


def questions_about(notes, num_questions, system=(), note_tokens=40, own=6):
    """Examples that begin with a system prompt and one of the notes."""
    draw = random.Random(0)
    texts = [[draw.randrange(100) for _ in range(note_tokens)] for _ in range(notes)]
    asked = [
        [*system, *text, *(draw.randrange(100, 200) for _ in range(own))]
        for text in texts
        for _ in range(num_questions)
    ]
    draw.shuffle(asked)
    return [example(ids, len(ids) - 2) for ids in asked]


def test_questions_share_their_note_and_not_only_the_system_prompt():
    examples = questions_about(3, 4, system=range(300, 310))
    tokens = pack(examples)
    shared = share_beginnings(tokens)
    assert len(tokens.input_ids) == 12 * 55
    assert len(shared.input_ids) == 3 * 50 + 12 * 5
    assert sorted(shared.prefixes.lengths.tolist()) == [0] * 3 + [50] * 12
    one_each = share_beginnings(pack(questions_about(12, 1, system=range(300, 310))))
    assert len(one_each.input_ids) == 10 + 12 * 45


def test_a_gpu_shares_only_where_that_saves_more_than_slower_attention_costs():
    few = pack(questions_about(2, 1, system=range(300, 310), note_tokens=60))  # saves 10 of 150 rows
    assert share_beginnings(few, on_gpu=True) is few
    assert share_beginnings(few) is not few
    long = pack(questions_about(1, 2, note_tokens=MAX_LENGTH_GPU))
    assert share_beginnings(long, on_gpu=True) is long
    assert share_beginnings(long) is not long
    shorter = pack(questions_about(1, 2, note_tokens=MAX_LENGTH_GPU - 10))
    assert share_beginnings(shorter, on_gpu=True) is not shorter


@pytest.mark.parametrize("bucket", [Bucket(70, 8, 40, 46), Bucket(100, 9, 32, 50)])
def test_filler_continues_nothing(bucket):
    tokens = share_beginnings(pack(examples_of(random.Random(0), SHAPES["two groups"])))
    filled = tokens.filled(bucket)
    num_sequences, num_rows = len(tokens.cu_seqlens) - 1, len(tokens.input_ids)
    prefixes, ends = filled.prefixes, filled.cu_seqlens[1:]
    for name in ("begins", "lengths", "readers_end"):
        assert getattr(prefixes, name).dtype == torch.int32
        assert torch.equal(getattr(prefixes, name)[:num_sequences], getattr(tokens.prefixes, name))
    assert not prefixes.lengths[num_sequences:].any()
    assert torch.equal(prefixes.readers_end[num_sequences:], ends[num_sequences:])
    assert torch.equal(prefixes.positions[:num_rows], tokens.prefixes.positions)
    assert len(prefixes.positions) == bucket.tokens
    own = [begin + at for begin, end in pairwise(filled.cu_seqlens.tolist()) for at in range(end - begin)]
    begins = filled.cu_seqlens[:-1].repeat_interleave(filled.cu_seqlens.diff().long())
    assert torch.equal((begins + prefixes.positions)[num_rows:], torch.tensor(own)[num_rows:])


def test_rows_are_saved():
    prefix = list(range(1, 23))
    tokens = pack([example([*prefix, 30 + number, 40 + number, 50 + number, 60], 24) for number in range(10)])
    assert len(tokens.input_ids) == 250
    assert len(share_beginnings(tokens).input_ids) == 22 + 10 * 3
    assert share_beginnings(tokens, on_gpu=True).sizes == share_beginnings(tokens).sizes


@pytest.mark.parametrize("family", sorted(DECODERS.keys() - {"recurrent-gemma", "xlstm", "opt", "phi"}))
def test_losses_and_gradients_are_those_without_sharing(family):
    model = make_decoder(family)
    examples = examples_of(random.Random(1), SHAPES["two groups"])
    with Hoisted(model) as hoisted:
        found = []
        for tokens in (pack(examples), share_beginnings(pack(examples))):
            model.zero_grad()
            losses = hoisted.row_losses(tokens)
            losses.sum().backward()
            found.append([losses.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for expected, shared in zip(*found, strict=True):
        assert (shared - expected).norm() <= 1e-5 * expected.norm()  # the loss is computed in fp32


@pytest.mark.parametrize("options", [{"checkpoints": 1}, {"checkpoints": 1, "chunked_blocks": True}], ids=str)
def test_recomputed_blocks_share_too(options):
    model = make_llama().double()
    tokens = share_beginnings(pack(examples_of(random.Random(1), SHAPES["two groups"])))
    found = []
    for each in ({}, options):
        with Hoisted(model, **each) as hoisted:
            found.append(torch.autograd.grad(hoisted.row_losses(tokens).sum(), list(model.parameters())))
    for expected, recomputed in zip(*found, strict=True):
        assert (recomputed - expected).norm() <= 1e-10 * expected.norm()


def test_a_prefix_can_be_forgotten_by_no_sequence():
    """A change of the shared tokens changes every sequence that continues them, and no other."""
    model = make_llama()
    shapes = [(0, 4, 0), (0, 6, 0), (None, 12, 0)]
    examples = examples_of(random.Random(0), shapes)
    other = [example([3, *one.input_ids[1:]], one.labels.index(one.input_ids[-1])) for one in examples[:2]]
    with Hoisted(model) as hoisted, torch.no_grad():
        tokens, changed = share_beginnings(pack(examples)), share_beginnings(pack([*other, examples[2]]))
        assert (tokens.prefixes.lengths > 0).tolist() == (changed.prefixes.lengths > 0).tolist()
        before, after = hoisted.row_losses(tokens), hoisted.row_losses(changed)
    torch.testing.assert_close(after[changed.sequences == 2], before[tokens.sequences == 2])
    assert (after[changed.sequences < 2][-1] - before[tokens.sequences < 2][-1]).abs() > 1e-6
