"""A text is typed as a person does it with `complete`: after each key, with a key for each word or for all of it."""

import math

import pytest
import torch
from failing_memory import CPU

from sebp_edge.engine.training.keystrokes import MOST_BYTES, TypedToken, type_tokens
from sebp_edge.engine.training.words import WordReader


def token(text, share=1.0, *, top=None, next=1.0, going_on=0.0):
    """A token whose share is the same from each byte on.

    Args:
        top: the share of the likeliest token, if that is another one.
        next: the probability of the likeliest token; negative if that is another one.
    """
    goes_on, ends_in_word = text[:1].isalpha(), text[-1:].isalpha()
    tops = [share if top is None else top] * MOST_BYTES
    return TypedToken(text.encode(), goes_on, ends_in_word, next > 0, abs(next), going_on, [share] * MOST_BYTES, tops)


UNSURE, END = {"share": 0.1, "top": 0.2, "next": -0.2}, token("")


@pytest.mark.parametrize(
    ("tokens", "saved", "shown", "right"),
    [
        # A key for the space, one for the rest.
        ([token(" ferry"), token("."), token("\n"), END], 5, 1, 1),
        ([token(" ferry"), END], 4, 1, 1),
        ([token(" the"), token("re", going_on=0.9), END], 4, 1, 1),
        # The second word is typed, since the model is unsure of it.
        ([token(" ferry"), token(" is", 0.4, next=0.4), END], 4, 1, 1),
        # Something wrong follows: the right word has a key of its own.
        ([token(" a"), token(" ferry"), token(" is", **UNSURE | {"next": -0.9}), END], 5, 2, 1),
        # The model ends the word, or goes on with it, and the text does not.
        ([token(" the"), token("re", 0.1, next=-0.1, going_on=0.1), END], 0, 1, 0),
        ([token(" the"), token(".", **UNSURE, going_on=0.9), END], 0, 0, 0),
        # Another token is likelier after some letters; another one has no more letters.
        ([token(" ferry", 0.3, top=0.6), END], 0, 1, 0),
        ([token(" ferry", 0.3, top=-0.6), END], 0, 0, 0),
        # A suggestion ends with its sentence, and with its line; what follows is suggested then.
        ([token(" six"), token("."), token(" The"), END], 6, 2, 2),
        ([token(" six"), token("\n"), token("seven"), END], 6, 2, 2),
        # Characters are keys, however many bytes or tokens they have.
        ([token(" über"), END], 3, 1, 1),
        ([TypedToken(b"\xc3", True, False, True, 1, 0, [0] * 8, [0] * 8), token("", 0), END], 0, 0, 0),
        ([token(" six", math.nan), END], 0, 0, 0),
        # Nothing tells whether the model would have ended the word.
        ([token(" ferry")], 0, 0, 0),
        ([], 0, 0, 0),
    ],
)
def test_a_person_accepts_what_is_right(tokens, saved, shown, right):
    assert type_tokens(tokens) == (saved, shown, right)


def test_a_suggestion_is_shown_from_a_probability_on():
    tokens = [token(" ferry", 0.3), token(" is", 0.3, next=0.9), END]
    assert type_tokens(tokens, 0.31) == (0, 0, 0)
    assert type_tokens(tokens, 0.3).saved == 5 and type_tokens(tokens, 0.25).saved == 7


def test_shares_are_those_among_all_tokens_that_begin_with_what_is_typed(base):
    vocabulary, size = base.vocabulary, len(base.vocabulary.going_on_after("a"))
    known = torch.tensor([each for each in range(size) if vocabulary[each]])
    logits_VV = 3 * torch.randn(len(known), size)
    rows = WordReader(vocabulary, CPU).read([logits_VV], known)[:, -2 * MOST_BYTES :]
    probabilities_VV = logits_VV.softmax(dim=1)
    for target, values, own_V in zip(known.tolist(), rows.tolist(), probabilities_VV, strict=True):
        for at in range(min(MOST_BYTES, len(vocabulary[target]))):
            among = vocabulary.beginning_with(vocabulary[target][: at + 1])
            top = max(among, key=own_V.__getitem__)
            sign = 1 if len(vocabulary[top]) > at + 1 else -1
            expected = [float(own_V[each] / own_V[among].sum()) for each in (target, top)]
            assert values[at] == pytest.approx(expected[0], rel=1e-4)
            assert values[MOST_BYTES + at] == pytest.approx(sign * expected[1], rel=1e-4)
            assert (values[at] == abs(values[MOST_BYTES + at])) == (top == target)
