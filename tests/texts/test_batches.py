"""Examples become right-padded batches with their row plans, steps of equal weight, and full micro-batches."""

import random
from itertools import pairwise

import pytest
import torch

from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.texts.batches import Collator, bucket_for, micro_batches, shuffled_steps
from sebp_edge.texts.examples import Example

IGNORE = -100


def example(length: int, prompt: int = 1, document: int = 0) -> Example:
    """`length` tokens, of which the first `prompt` are not learnt."""
    ids = list(range(10, 10 + length))
    return Example(ids, [IGNORE] * prompt + ids[prompt:], document)


def test_batches_are_padded_on_the_right_to_the_context_length():
    batch = Collator(context_length=8, pad_token_id=3)([example(5), example(8), example(2)])
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape == (3, 8)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.attention_mask.sum(1).tolist() == [5, 8, 2]
    assert batch.input_ids[0].tolist() == [10, 11, 12, 13, 14, 3, 3, 3]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.labels[0].tolist() == [IGNORE, 11, 12, 13, 14, IGNORE, IGNORE, IGNORE]


def test_padding_is_told_from_an_eos_by_mask_and_labels_alone():
    """Llama 3 has no pad token, so its EOS fills the padding."""
    ids = [10, 11, 1]
    batch = Collator(context_length=6, pad_token_id=1)([Example(ids, [IGNORE, *ids[1:]], 0)])
    assert batch.labels[0].tolist() == [IGNORE, 11, 1, IGNORE, IGNORE, IGNORE]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 0, 0, 0]


def test_the_row_plan_says_what_the_labels_say():
    examples = [example(5), example(8, prompt=4), example(2), example(8, prompt=7)]
    batch = Collator(context_length=8, pad_token_id=0)(examples)
    plan = batch.plan
    assert plan.num_rows == 4 * 8
    assert len(plan.loss_rows) == sum(example.num_loss_tokens for example in examples)
    # The row before each learnt token predicts it.
    assert torch.equal(batch.input_ids.flatten()[plan.loss_rows + 1], plan.targets)
    assert torch.equal(batch.labels.flatten()[plan.loss_rows + 1], plan.targets)
    lengths = [len(example.input_ids) - 1 for example in examples]
    assert plan.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert plan.max_len == max(lengths)
    assert plan.active_rows.tolist() == [8 * row + t for row, length in enumerate(lengths) for t in range(length)]


def many(count: int = 200, longest: int = 60) -> list[Example]:
    order = random.Random(0)
    return [example(order.randint(2, longest), document=number) for number in range(count)]


@pytest.mark.parametrize("batch_tokens", [1, 50, 300, 1024, 10**9])
def test_each_epoch_has_every_example_in_exactly_one_step(batch_tokens):
    examples = many()
    epochs = shuffled_steps(examples, batch_tokens, epochs=3, seed=0)
    assert len(epochs) == 3
    for steps in epochs:
        assert all(steps)
        assert sorted(example.document for step in steps for example in step) == list(range(200))
    assert epochs[0] != epochs[1]


def test_the_order_follows_the_seed_alone():
    assert shuffled_steps(many(), 300, 2, seed=5) == shuffled_steps(many(), 300, 2, seed=5)
    assert shuffled_steps(many(), 300, 2, seed=5) != shuffled_steps(many(), 300, 2, seed=6)


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_about_equally_full(seed):
    examples = many()
    total = sum(example.num_loss_tokens for example in examples)
    [steps] = shuffled_steps(examples, 400, 1, seed)
    assert len(steps) == round(total / 400)
    for step in steps:
        assert abs(sum(example.num_loss_tokens for example in step) - total / len(steps)) <= 60


def test_an_example_larger_than_a_step_does_not_make_the_next_one_tiny():
    """As whole contexts beside short answers, in chats."""
    examples = [example(size) for size in [1001, 3, 3, 3, 3] * 8]
    for seed in range(20):
        [steps] = shuffled_steps(examples, 500, 1, seed)
        sizes = [sum(example.num_loss_tokens for example in step) for step in steps]
        assert min(sizes) >= 250


def test_few_tokens_make_one_step():
    assert shuffled_steps([example(3)], 1024, 1, seed=0) == [[[example(3)]]]


def active_tokens(example: Example) -> int:
    return example.num_active_tokens


@pytest.mark.parametrize("max_rows", [1, 59, 60, 300, 4096, 10**9])
def test_micro_batches_hold_every_example_once_and_the_longest_first(max_rows):
    groups = micro_batches(many(), max_rows, active_tokens)
    together = [example for group in groups for example in group]
    assert sorted(example.document for example in together) == list(range(200))
    lengths = [example.num_active_tokens for example in together]
    assert lengths == sorted(lengths, reverse=True)
    for group in groups:
        assert len(group) == 1 or sum(map(active_tokens, group)) <= max_rows


def test_micro_batches_are_full_but_for_the_last():
    groups = micro_batches(many(), 300, active_tokens)
    for group, following in pairwise(groups):
        assert sum(map(active_tokens, group)) + active_tokens(following[0]) > 300
    assert len(groups) > 20


def test_a_longer_example_stands_alone():
    groups = micro_batches([example(4), example(100), example(5), example(90)], 20, active_tokens)
    assert [[len(example.input_ids) for example in group] for group in groups] == [[100], [90], [5, 4]]
    assert micro_batches([], 20, active_tokens) == []


def test_examples_of_one_length_keep_their_order():
    """As padded ones, which all take the context length."""
    groups = micro_batches(many(7), 128, lambda example: 64)
    assert [example.document for group in groups for example in group] == list(range(7))
    assert [len(group) for group in groups] == [2, 2, 2, 1]


def some_with_prompts() -> list[Example]:
    order = random.Random(1)
    examples = [example(length, prompt=order.randint(1, length - 1)) for length in range(2, 40, 3)]
    # A chat whose last message is not learnt.
    return [*examples, Example([10, 11, 12, 13, 14], [IGNORE, 11, 12, IGNORE, IGNORE], 0)]


def test_an_example_knows_how_many_active_tokens_it_has():
    examples = some_with_prompts()
    plan = Collator(context_length=64, pad_token_id=0)(examples).plan
    assert [example.num_active_tokens for example in examples] == plan.cu_seqlens.diff().tolist()


@pytest.mark.parametrize("count", [1, 2, 13])
def test_a_micro_batch_fits_into_its_bucket(count):
    examples = some_with_prompts()[-count:]
    batch = Collator(context_length=64, pad_token_id=0)(examples)
    tokens = ActiveTokens.gather(batch.input_ids, batch.plan)
    bucket = bucket_for(examples)
    assert bucket == type(bucket).holding(*tokens.sizes)
    assert len(tokens.filled(bucket).input_ids) == bucket.tokens
