"""Examples become right-padded batches with row plans, or the same active tokens packed."""

import random
from dataclasses import fields

import pytest
import torch
from builders import example
from teachers import taught

from sebp_edge.engine.sparse.rows.batches import Collator, pack
from sebp_edge.engine.sparse.rows.soft_targets import SoftTargets
from sebp_edge.research import ActiveTokens
from sebp_edge.values.example import Example, TeacherTokens

IGNORE = -100


def test_batches_are_padded_on_the_right_to_the_context_length():
    batch = Collator(context_length=8, pad_token_id=3)([example(5), example(8), example(2)])
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape == (3, 8)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.attention_mask.sum(1).tolist() == [5, 8, 2]
    assert batch.input_ids[0].tolist() == [10, 11, 12, 13, 14, 3, 3, 3]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.labels[0].tolist() == [IGNORE, 11, 12, 13, 14, IGNORE, IGNORE, IGNORE]


def test_mask_and_labels_distinguish_padding_from_an_eos():
    """Llama 3 has no pad token, so its EOS fills the padding."""
    ids = [10, 11, 1]
    batch = Collator(context_length=6, pad_token_id=1)([Example(ids, [IGNORE, *ids[1:]], 0)])
    assert batch.labels[0].tolist() == [IGNORE, 11, 1, IGNORE, IGNORE, IGNORE]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 0, 0, 0]


def test_the_row_plan_agrees_with_the_labels():
    examples = [example(5), example(8, prompt=4), example(2), example(8, prompt=7)]
    batch = Collator(context_length=8, pad_token_id=0)(examples)
    plan = batch.plan
    assert plan.num_rows == 4 * 8
    assert len(plan.loss_rows) == sum(example.num_loss_tokens for example in examples)
    # The row before each loss token predicts it.
    assert torch.equal(batch.input_ids.flatten()[plan.loss_rows + 1], plan.targets)
    assert torch.equal(batch.labels.flatten()[plan.loss_rows + 1], plan.targets)
    lengths = [len(example.input_ids) - 1 for example in examples]
    assert plan.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert plan.max_len == max(lengths)
    assert plan.active_rows.tolist() == [8 * row + t for row, length in enumerate(lengths) for t in range(length)]


def some_with_prompts() -> list[Example]:
    order = random.Random(1)
    examples = [example(length, prompt=order.randint(1, length - 1)) for length in range(2, 40, 3)]
    # A chat whose last message has no loss.
    return [*examples, Example([10, 11, 12, 13, 14], [IGNORE, 11, 12, IGNORE, IGNORE], 0)]


@pytest.mark.parametrize("count", [1, 2, 13])
def test_packed_tokens_equal_those_gathered_from_the_padded_batch(count):
    examples = some_with_prompts()[-count:]
    batch = Collator(context_length=64, pad_token_id=0)(examples)
    packed, gathered = pack(examples), ActiveTokens.gather(batch.input_ids, batch.plan)
    for field in fields(ActiveTokens):
        one, other = getattr(packed, field.name), getattr(gathered, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name


def assert_packed_as_gathered(examples):
    batch = Collator(context_length=64, pad_token_id=0)(examples)
    packed, gathered = pack(examples), ActiveTokens.gather(batch.input_ids, batch.plan)
    for field in fields(ActiveTokens):
        one, other = getattr(packed, field.name), getattr(gathered, field.name)
        if isinstance(other, SoftTargets):
            assert all(map(torch.equal, one, other))
        else:
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, field.name
    return packed


@pytest.mark.parametrize("ks", [(4, 4, 4), (0, 4, 0), (0, 0, 4), (1, 4, 0), (2, 0, 5)])
def test_a_teachers_tokens_are_the_targets_and_soft_targets_of_its_example(ks):
    examples = taught([example(5), example(8, prompt=4), example(3)], ks)
    packed = assert_packed_as_gathered(examples)
    assert packed.num_soft_targets == max(ks) - 1
    for number, own in enumerate(examples):
        rows = packed.sequences == number
        targets, others, shares = (part[rows] for part in (packed.targets, *packed.soft_targets))
        if own.teacher is None:
            assert targets.tolist() == [label for label in own.labels[1:] if label != IGNORE]
            assert not shares.any()
            continue
        k = own.teacher.k
        ids = torch.cat([targets[:, None], others], dim=1)[:, :k]
        assert ids.flatten().tolist() == list(own.teacher.ids)
        assert torch.equal(shares[:, : k - 1], torch.tensor(own.teacher.shares).view(-1, k)[:, 1:])
        assert not shares[:, k - 1 :].any()


def test_teachers_of_one_token_only_replace_the_labels():
    examples = taught([example(5), example(8)], (1, 0))
    packed = assert_packed_as_gathered(examples)
    assert packed.soft_targets is None
    assert packed.targets.tolist() == [*examples[0].teacher.ids, *range(11, 18)]


def test_a_taught_example_without_loss_tokens_adds_no_row():
    silent = Example([10, 11, 12], [IGNORE] * 3, 0, teacher=TeacherTokens([], [], 4))
    packed = assert_packed_as_gathered([silent, *taught([example(5)], [4])])
    assert packed.soft_targets.ids.shape == (4, 3)
