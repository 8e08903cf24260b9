"""Tokens become text: whole characters, no stop string and no part of one, no empty piece, however tokens are cut."""

import random

import pytest

from sebp_edge.models.text_stream import TextStream


class Cut:
    """A tokenizer whose tokens are given pieces of bytes."""

    def __init__(self, pieces):
        self._pieces = pieces

    def decode(self, tokens, *, skip_special_tokens):
        return b"".join(self._pieces[token] for token in tokens).decode(errors="replace")


def write(pieces, stop=()):
    """What is handed out of these pieces, and how many of them were taken."""
    handed, taken = [], 0
    text_stream = TextStream(Cut(pieces), stop, handed.append)
    for token in range(len(pieces)):
        taken += 1
        if text_stream.add(token):
            break
    text_stream.end()
    assert all(handed)
    assert text_stream.text == "".join(handed)
    return handed, taken


def cuts(text, seed):
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
def test_a_stop_string_is_found_wherever_tokens_are_cut(text, stop, expected):
    for seed in range(200):
        pieces, _ = write(cuts(text, seed), stop)
        assert "".join(pieces) == expected


def test_nothing_is_taken_after_a_stop_string():
    pieces, taken = write([b"one ", b"two ", b"EN", b"D three", b" four"], ["END"])
    assert (pieces, taken) == (["one ", "two "], 4)


def test_what_may_become_a_stop_string_waits_and_then_comes():
    pieces, _ = write([b"a E", b"N", b"ough", b" EN"], ["END"])
    assert pieces == ["a ", "ENough", " ", "EN"]


def test_a_character_comes_whole_and_half_of_one_at_the_end_is_marked():
    assert write([b"f\xc3", b"\xa4", b"hre"])[0] == ["fä", "hre"]
    assert write([b"f", b"\xc3"])[0] == ["f", "\ufffd"]


def test_a_token_without_text_gives_no_piece():
    assert write([b"", b"a", b"", b"b"])[0] == ["a", "b"]


def test_blanks_that_a_tokenizer_drops_in_front_are_kept_between_tokens():
    class Words:
        def decode(self, tokens, *, skip_special_tokens):
            return "".join(["▁the", "▁fer", "ry"][token] for token in tokens).replace("▁", " ").removeprefix(" ")

    pieces = []
    text_stream = TextStream(Words(), [], pieces.append)
    for token in range(3):
        text_stream.add(token)
    assert pieces == ["the", " fer", "ry"]
