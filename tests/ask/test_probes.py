"""An item's texts are right and wrong, guessing knows half of the items, and a loss is told from chance."""

import itertools
import random
from fractions import Fraction

import pytest
from builders import make_tokenizer

from sebp_edge.ask.general_texts import fact_items, general_questions, language_items
from sebp_edge.values.documents import texts_of
from sebp_edge.values.probe_figures import ProbeFigures, by_chance, describe


@pytest.fixture(autouse=True)
def all_items(make_items):
    make_items(40)


def difference(right, wrong):
    """The words in which two sentences differ."""
    right, wrong = right.split(), wrong.split()
    begin = next(place for place in range(len(right)) if right[place] != wrong[place])
    end = next(place for place in range(len(right)) if right[-1 - place] != wrong[-1 - place])
    return right[begin : len(right) - end], wrong[begin : len(wrong) - end]


def test_two_sentences_exchange_what_is_right_and_wrong():
    items = list(language_items())
    assert len(items) == 40 and len({text for item in items for text in item}) == 160
    for right, wrong, other_right, other_wrong in items:
        (one, mistake), (other, other_mistake) = difference(right, wrong), difference(other_right, other_wrong)
        assert [len(one), one, other] == [1, other_mistake, mistake], right


@pytest.mark.parametrize("has_template", [True, False])
def test_two_questions_exchange_their_answers(has_template):
    tokenizer = make_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    items, asked = list(fact_items(tokenizer)), list(general_questions())
    assert len(items) == 40
    for number, item in enumerate(items):
        (question, answers), (other, others) = asked[2 * number : 2 * number + 2]
        assert not {*answers} & {*others}
        texts = [[text.strip() for text in texts_of(content)] for content in item]
        assert [text[-1] for text in texts] == [answers[0], others[0], others[0], answers[0]]
        assert all(each in text[0] for each, text in zip((question, question, other, other), texts, strict=True))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_few_questions_make_few_items(number, monkeypatch, tmp_path):
    (tmp_path / "questions.txt").write_text("".join(f"What is {each}?|{each}\n" for each in range(number)))
    monkeypatch.setattr("sebp_edge.ask.general_texts.FOLDER", tmp_path)
    assert len(list(fact_items(make_tokenizer()))) == number // 2


@pytest.mark.parametrize("total", [0, 1, 2, 7])
def test_the_chance_of_coins_is_exact(total):
    throws = list(itertools.product([0, 1], repeat=total))
    for number in range(total + 1):
        assert by_chance(number, total) == Fraction(sum(sum(each) >= number for each in throws), len(throws))


def test_only_a_base_model_that_knows_more_than_by_guessing_can_lose_anything():
    nothing = ProbeFigures.of([True, False] * 30, [False] * 60)
    assert not nothing.is_telling and not nothing.is_worse
    assert str(nothing) == "0 of 60, 30 before (no better than guessing, so this tells nothing)"
    assert ProbeFigures.of([True] * 60, [False] * 60).is_worse


def test_a_loss_counts_if_chance_makes_it_in_one_of_forty_cases():
    """Six lost and none gained, or eight and one; the rest stays."""
    for lost, gained, is_worse in [(0, 0, 0), (5, 0, 0), (6, 0, 1), (7, 1, 0), (8, 1, 1), (9, 3, 0), (3, 9, 0)]:
        before, after = [True] * 40 + [True] * lost + [False] * gained, [True] * 40 + [False] * lost + [True] * gained
        order = random.sample(range(len(before)), len(before))
        figures = ProbeFigures.of([before[n] for n in order], [after[n] for n in order])
        assert (figures.before, figures.after, figures.lost) == (40 + lost, 40 + gained, lost)
        assert figures.is_worse == bool(is_worse), (lost, gained)


def test_changes_by_chance_are_seldom_taken_for_a_loss():
    draw, warned = random.Random(), 0
    for _ in range(2000):
        before, after = ([draw.random() > 0.2 for _ in range(40)] for _ in range(2))
        warned += ProbeFigures.of(before, after).is_worse
    assert warned < 100  # at most 50 are expected


def test_figures_that_are_not_there_are_not_described():
    assert ProbeFigures.of([], []) is None and describe(None, None) == ""
    some = ProbeFigures.of([True] * 9, [True] * 8 + [False])
    assert describe(some, None) == "language 8 of 9, 9 before"
    assert describe(some, some) == "language 8 of 9, 9 before; facts 8 of 9, 9 before"
