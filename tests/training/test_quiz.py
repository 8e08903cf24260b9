"""A quiz decides by the questions that differ: more right answers than chance would give."""

import itertools
import random

import pytest

from sebp_edge.engine.training.gate import GateResult, Verdict
from sebp_edge.engine.training.quiz import CHANCE, QuizResult, Replies, is_more
from sebp_edge.values.dataset import Quiz, QuizQuestion


def brute_force(before, after):
    """Whether the share of signs that favour `after` as much or more is at most CHANCE."""
    signs = [new - old for old, new in zip(before, after, strict=True) if new != old]
    cases = list(itertools.product([1, -1], repeat=len(signs)))
    as_much = sum(sum(case) >= sum(signs) for case in cases)
    return sum(signs) > 0 and as_much / len(cases) <= CHANCE


@pytest.mark.parametrize("size", [0, 1, 3, 6])
def test_the_sign_test_is_exact(size):
    for before in itertools.product([False, True], repeat=size):
        for after in itertools.product([False, True], repeat=size):
            assert is_more(list(before), list(after)) == brute_force(before, after)


def quiz(before, after, general=("1" * 12, "1" * 12), active=None):
    """A quiz whose replies are right where there is a 1."""
    asked = [
        QuizQuestion(f"question {number}", ("yes", "yea"), (number,), (number,), (number,)) for number in range(12)
    ]

    def replies(found, general):
        found, general = (tuple("yea" if one == "1" else "no" for one in part) for part in (found, general))
        return Replies(found, ("yes",) * 12, ("no",) * 12, general)

    worse = None if active is None else replies(active, general[0])
    both = (replies(*each) for each in zip((before, after), general, strict=True))
    return QuizResult(Quiz(tuple(asked), tuple(asked), refused=1, rightly_refused=10), *both, worse)


NONE, SOME, ALL = "0" * 12, "1" * 5 + "0" * 7, "1" * 12


@pytest.mark.parametrize(
    ("result", "verdict", "words"),
    [
        (
            quiz(NONE, ALL),
            Verdict.BETTER,
            "Of 12 questions about notes that it has not seen, it answers 12 right, 0 before",
        ),
        (quiz(NONE, SOME), Verdict.BETTER, "it answers 5 right, 0 before"),
        (quiz(NONE, "1" + "0" * 11), Verdict.NO_GAIN, "too few more for the gate"),
        (quiz(ALL, NONE), Verdict.NO_GAIN, "so it does not read better than the base model"),
        (
            quiz(NONE, ALL, (ALL, SOME)),
            Verdict.FORGETS,
            "Of 12 general questions, it answers 5 right, 12 before: it has forgotten",
        ),
        (
            quiz(NONE, ALL, (ALL, "0" * 4 + "1" * 8)),
            Verdict.BETTER,
            "It answers fewer general questions, by no more than chance explains.",
        ),
        (
            quiz(NONE, SOME, active=ALL),
            Verdict.WORSE_THAN_ACTIVE,
            "it answers 5 right, and the version that is active 12.",
        ),
        (quiz(NONE, ALL, active=SOME), Verdict.BETTER, "It answers as many general questions as before."),
    ],
)
def test_the_verdict_and_its_explanation(result, verdict, words):
    judged = GateResult(Verdict.NOT_JUDGED).with_quiz(result)
    assert judged.verdict is verdict and judged.passed == (verdict is Verdict.BETTER)
    assert words in judged.explain(0.01, ())


def test_the_figures_count_each_kind_of_question():
    figures = quiz(NONE, SOME, (ALL, SOME), active=NONE).figures
    assert (figures.questions, figures.general_questions) == (12, 12)
    assert (figures.right_before, figures.right_after, figures.right_active) == (0, 5, 0)
    assert (figures.right_passage_before, figures.right_passage_after) == (12, 12)
    assert (figures.alone_before, figures.alone_after) == (0, 0)
    assert (figures.general_before, figures.general_after) == (12, 5)
    assert (figures.refused, figures.rightly_refused) == (1, 10)


def test_a_training_without_effect_is_kept_in_at_most_5_of_100_cases():
    """Simulated: each question is answered right by chance, before and after, as often."""
    draw = random.Random(0)
    for share in (0.1, 0.5):
        kept = sum(is_more(*([draw.random() < share for _ in range(60)] for _ in range(2))) for _ in range(2000))
        assert kept <= 0.06 * 2000, share
