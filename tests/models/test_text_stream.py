"""Streaming of tokens as text: whole characters, no part of a stop string, and no empty parts, for any tokens."""

import random

import pytest

from sebp_edge.engine.models.generation import TextStream


class BytesTokenizer:
    """A tokenizer whose tokens are the given bytes."""

    def __init__(self, tokens):
        self._vocabulary = tokens

    def decode(self, tokens, *, skip_special_tokens):
        return b"".join(self._vocabulary[token] for token in tokens).decode(errors="replace")


def stream(tokens, stop=()):
    """Streams tokens of these bytes; returns the emitted parts, and the number of tokens taken."""
    parts, num_taken = [], 0
    text_stream = TextStream(BytesTokenizer(tokens), stop, parts.append)
    for token in range(len(tokens)):
        num_taken += 1
        if text_stream.add(token):
            break
    text_stream.end()
    assert all(parts)
    assert text_stream.text == "".join(parts)
    return parts, num_taken


def cut(text, seed):
    draw, raw = random.Random(seed), text.encode()
    cut_offsets = sorted(draw.sample(range(1, len(raw)), draw.randrange(1, len(raw))))
    return [raw[a:b] for a, b in zip([0, *cut_offsets], [*cut_offsets, len(raw)], strict=True)]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The key is here.\nUser: where?", ["\nUser:"], "The key is here."),
        ("a\n\nb", ["\n\n", "\n\n\n"], "a"),
        ("aaab", ["aab"], "a"),
        ("über die Fähre — ⛴️ fährt", ["— ⛴️"], "über die Fähre "),
        ("abcd", ["bcd", "c"], "ab"),
        ("no stop in here", ["xyz", "heree"], "no stop in here"),
        ("stop", ["stop"], ""),
    ],
)
def test_a_stop_string_is_found_for_any_split_into_tokens(text, stop, expected):
    for seed in range(200):
        parts, _ = stream(cut(text, seed), stop)
        assert "".join(parts) == expected


def test_no_token_is_taken_after_a_stop_string():
    parts, num_taken = stream([b"one ", b"two ", b"EN", b"D three", b" four"], ["END"])
    assert (parts, num_taken) == (["one ", "two "], 4)


def test_a_possible_start_of_a_stop_string_is_emitted_later():
    parts, _ = stream([b"a E", b"N", b"ough", b" EN"], ["END"])
    assert parts == ["a ", "ENough", " ", "EN"]


def test_characters_are_emitted_whole_and_half_of_one_at_the_end_is_replaced():
    assert stream([b"f\xc3", b"\xa4", b"hre"])[0] == ["fä", "hre"]
    assert stream([b"f", b"\xc3"])[0] == ["f", "\ufffd"]


def test_spaces_that_a_tokenizer_strips_at_the_start_are_kept_between_tokens():
    class Words:
        def decode(self, tokens, *, skip_special_tokens):
            return "".join(["▁the", "▁fer", "ry"][token] for token in tokens).replace("▁", " ").removeprefix(" ")

    parts = []
    text_stream = TextStream(Words(), [], parts.append)
    for token in range(3):
        text_stream.add(token)
    assert parts == ["the", " fer", "ry"]
