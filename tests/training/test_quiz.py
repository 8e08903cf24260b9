"""A quiz decides by the questions that differ: more right answers than chance would give."""

import itertools

import pytest

from sebp_edge.texts.dataset import QuizQuestion
from sebp_edge.training.gate import GateResult, Verdict
from sebp_edge.training.quiz import CHANCE, QuizResult, Replies, is_more


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


def quiz(before, after, with_before, with_after, active=None):
    """A quiz whose replies are right where there is a 1."""
    questions = tuple(QuizQuestion(number, f"question {number}", "yes", (1,), (2,)) for number in range(len(before)))

    def replies(alone, with_document):
        return Replies(*(tuple("yes" if one == "1" else "no" for one in part) for part in (alone, with_document)))

    worse = None if active is None else replies(active, with_before)
    return QuizResult(questions, replies(before, with_before), replies(after, with_after), worse)


NONE, SOME, ALL = "0" * 12, "1" * 5 + "0" * 7, "1" * 12


@pytest.mark.parametrize(
    ("result", "verdict", "words"),
    [
        (
            quiz(NONE, ALL, SOME, ALL),
            Verdict.BETTER,
            "answers 12 of 12 questions about your notes (0 before), and 12 of",
        ),
        (quiz(NONE, SOME, SOME, SOME), Verdict.BETTER, "answers 5 of 12"),
        (quiz(NONE, "1" + "0" * 11, SOME, ALL), Verdict.NO_GAIN, "too few more for the gate"),
        (quiz(ALL, NONE, ALL, ALL), Verdict.NO_GAIN, "answers 0 of 12 questions about your notes (12 before)"),
        (quiz(NONE, ALL, ALL, NONE), Verdict.READS_WORSE, "reads worse than the base model"),
        (quiz(NONE, SOME, SOME, SOME, active=ALL), Verdict.WORSE_THAN_ACTIVE, "the version that is active answers 12"),
        (quiz(NONE, ALL, SOME, ALL, active=SOME), Verdict.BETTER, "answers 12 of 12"),
    ],
)
def test_the_verdict_and_its_explanation(result, verdict, words):
    judged = GateResult(Verdict.NOT_JUDGED).with_quiz(result)
    assert judged.verdict is verdict and judged.passed == (verdict is Verdict.BETTER)
    assert words in judged.explain(0.01, ())


def test_questions_that_were_not_asked_after_their_document_do_not_count():
    questions = tuple(QuizQuestion(0, "question", "yes", (1,), with_document) for with_document in (None, (2,)))
    result = QuizResult(questions, Replies(("no", "no"), (None, "yes")), Replies(("yes", "no"), (None, "yes")))
    figures = result.figures
    assert (figures.questions, figures.questions_with_note, figures.right_with_note_after) == (2, 1, 1)
    assert (figures.right_before, figures.right_after, figures.right_active) == (0, 1, None)
    assert [each.right for each in result.answered] == [True, False]
