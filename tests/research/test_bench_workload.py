"""The timed batch: the lengths of the user's texts or the built-in ones, and the requested padding."""

import pytest
import torch
from builders import make_examples

from sebp_edge.errors import OptionError
from sebp_edge.research.bench.workload import (
    Workload,
    built_in_lengths,
    padded_length,
    parse_share,
    pick_spread_lengths,
)

CPU = torch.device("cpu")


def test_the_built_in_lengths_are_those_of_short_notes():
    lengths = sorted(built_in_lengths(1000))
    assert lengths[500] == 30
    assert lengths[900] == pytest.approx(90, abs=1)
    assert built_in_lengths(1) == [30]
    assert all(length >= 2 for length in built_in_lengths(100_000)[:10])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_batch_is_spread_over_the_lengths_of_the_texts(count):
    examples = make_examples(range(2, 102))
    lengths = [len(example.input_ids) for example in pick_spread_lengths(examples, count)]
    assert lengths == sorted(set(lengths))
    assert sum(lengths) / count == pytest.approx(52, abs=1)
    assert pick_spread_lengths(examples[:count], 99) == examples[:count]


@pytest.mark.parametrize(
    ("text", "share"), [("90%", 0.9), ("0.9", 0.9), (" 12.5 % ", 0.125), ("0", 0.0), ("99%", 0.99)]
)
def test_shares_are_parsed_as_people_write_them(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "x", "100%", "1", "90", "-1%", "nan", "9O%", "٩٠%"])
def test_invalid_shares_are_refused(text):
    with pytest.raises(OptionError, match="must be a share of the batch below 1, such as '90%'"):
        parse_share(text)


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.931])
def test_padding_sets_the_context_length(share):
    examples = make_examples([3, 5, 7])
    context_length = padded_length(examples, share)
    assert 1 - 15 / (3 * context_length) >= share > 1 - 15 / (3 * (context_length - 1))


def test_less_padding_than_the_longest_text_leaves_is_refused():
    examples = make_examples([10, 10, 40])
    assert padded_length(examples, 0.5) == 40
    with pytest.raises(
        OptionError, match=r"of 10 to 40 tokens has at least 50 % padding; ask for that or more instead of 48 %\."
    ):
        padded_length(examples, 0.48)


def test_a_workload_has_the_lengths_and_the_losses_but_not_the_tokens_of_the_texts():
    examples = make_examples([9, 4, 12], prompt=3)
    work = Workload.of(examples, 16, 50, CPU)
    assert work.lengths == [4, 9, 12]
    assert (work.tokens, work.loss_tokens, work.context_length) == (25, 1 + 6 + 9, 16)
    assert work.padding_share == pytest.approx(1 - 25 / 48)
    assert work.batch.attention_mask.sum(dim=1).tolist() == work.lengths
    assert int(work.batch.input_ids.max()) < 50
    assert torch.equal(work.batch.input_ids, Workload.of(examples, 16, 50, CPU).batch.input_ids)
    assert Workload.of(examples, 8, 50, CPU).lengths == [4, 8, 8]
