"""A quiz decides whether an adapter of the recipe `ask` is kept."""

import pytest
import torch
from reader_notes import NO_EFFECT

from sebp_edge.training.quiz import Replies

pytestmark = pytest.mark.slow


def test_an_adapter_that_does_not_answer_better_is_saved_and_not_active(make):
    personalizer = make(recipe=NO_EFFECT)
    result = personalizer.adapt()
    assert (result.verdict, result.passed, result.active, result.version) == ("no gain", False, False, 1)
    assert "so it does not read better than the base model." in result.summary
    assert result.summary.startswith("Not better: version 1 of 'reader' is saved, but not active.")
    store = personalizer.store
    assert (store.adapter("reader").versions(), store.adapter("reader").active()) == ([1], None)
    assert store.adapter("reader").open(1).record.verdict == "no gain"
    assert personalizer.in_use.adapter_folder is None


@pytest.fixture
def reply(monkeypatch, learnt):
    """A function that sets how many replies are right, about notes and in general, each time that the quiz is asked."""

    def set_replies(*right):
        left = list(right)

        def ask_quiz(base, quiz, check):
            found, general = (
                tuple(one.answers[0] if n < number else "" for n, one in enumerate(asked))
                for number, asked in zip(left.pop(0), (quiz.about_notes, quiz.general), strict=True)
            )
            return Replies(found, found, found, general)

        monkeypatch.setattr("sebp_edge.run.assessment.ask_quiz", ask_quiz)
        return left

    return set_replies


@pytest.mark.parametrize(
    ("active", "before", "after", "verdict", "words"),
    [
        ((5, 2), (0, 2), (5, 1), "better", "and 1 of 2 general questions (2 before)"),
        ((0, 2), (0, 2), (4, 2), "no gain", "answers 4 of 5 questions"),
    ],
)
def test_the_base_model_and_the_active_version_are_asked_too(make, reply, active, before, after, verdict, words):
    left = reply(active, before, after)
    result = make(after=True, recipe=NO_EFFECT).adapt(fresh=True)
    assert left == []
    assert (result.verdict, result.active, result.compared_with) == (verdict, verdict == "better", 1)
    assert words in result.summary


def test_with_merge_for_the_base_model_is_asked_as_rounded_as_the_adapter(make, when_asked):
    weights = []
    when_asked(lambda model: weights.append(model.get_input_embeddings().weight.detach().clone()))
    result = make(recipe=NO_EFFECT.replace(merge_for="q4_0")).adapt()
    _, before, after = weights  # the first are the replies that it is the teacher of
    assert torch.equal(before, after)
    assert result.quiz.right_after == result.quiz.right_before
