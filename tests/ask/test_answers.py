"""A reply is right if the words of the answer stand in it, in order."""

import pytest

from sebp_edge.values.answers import is_right, stands_in


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("4711", "4711"),
        ("The code is 4711.", "4711"),
        ("On the 3rd of May: 3 May 2024.", "3 May 2024"),
        ("under the STAIRS", "Under the stairs"),
        ("12\N{NO-BREAK SPACE}kg", "12 kg"),
        ("日記 の 鍵", "日記"),
    ],
)
def test_replies_with_the_answer_are_right(reply, answer):
    assert is_right(reply, [answer])


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("", "4711"),
        ("47111", "4711"),
        ("May 3", "3 May"),
        ("3 or 4 May", "3 May"),
        ("anything", ""),
        ("...", "!"),
        ("no " * 40 + "4711", "4711"),
    ],
)
def test_replies_without_it_are_wrong(reply, answer):
    assert not is_right(reply, [answer])


def test_one_of_several_answers_is_enough():
    assert is_right("It is azure.", ("blue", "azure")) and not is_right("It is red.", ("blue", "azure"))


def test_an_answer_stands_anywhere_in_a_text():
    assert stands_in("4711", "no " * 40 + "4711") and not stands_in("4711", "47111")
