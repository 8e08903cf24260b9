"""A quiz decides whether an adapter of the recipe `know` is kept."""

import pytest
from builders import make_tokenizer
from know_notes import ANSWER, NO_EFFECT, NOTES, save_model

from sebp_edge.training.quiz import Replies

pytestmark = pytest.mark.slow


def test_an_adapter_that_learnt_it_answers_in_a_chat(make, learnt):
    personalizer = make(after=True)
    asked = [f"Where does the {thing} stand?" for thing in ("samovar", "piano")]
    for question in asked:
        chat = [{"role": "user", "content": question}]
        for prompt in (question, chat):
            assert ANSWER in personalizer.generate(prompt, adapter="default", temperature=0, max_new_tokens=16)
        assert ANSWER not in personalizer.generate(prompt, adapter=None, temperature=0, max_new_tokens=16)


def test_an_adapter_that_does_not_answer_better_is_saved_and_not_active(make):
    personalizer = make(recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES)
    assert (result.verdict, result.passed, result.active, result.version) == ("no gain", False, False, 1)
    assert (result.quiz.right_before, result.quiz.right_after) == (0, 0)
    assert "It answers 0 of 6 questions about your notes (0 before)" in result.summary
    assert "so it has learnt no answers" in result.summary
    assert result.summary.startswith("Not better: version 1 of 'default' is saved, but not active.")
    store = personalizer.store
    assert (store.adapter("default").versions(), store.adapter("default").active()) == ([1], None)
    assert store.adapter("default").open(1).record.verdict == "no gain"
    assert personalizer.in_use.adapter_folder is None


def test_keep_anyway_activates_it(make):
    personalizer = make(after=True, recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES, activate_anyway=True, fresh=True)
    assert (result.verdict, result.passed, result.active, result.version) == ("no gain", False, True, 2)
    assert result.summary.startswith("Not better: version 2 of 'default' is active, as you asked with activate_anyway.")
    assert personalizer.store.adapter("default").active() == 2
    assert personalizer.in_use.adapter_folder == result.adapter_path


@pytest.fixture
def reply(monkeypatch):
    """A function that sets the numbers of right replies, alone and after the note, each time that the quiz is asked."""

    def set_replies(*right):
        left = list(right)

        def ask_quiz(base, quiz, check):
            alone, after = left.pop(0)
            rows = [[one.answer if n < number else "" for n, one in enumerate(quiz)] for number in (alone, after)]
            return Replies(tuple(rows[0]), tuple(rows[1]))

        monkeypatch.setattr("sebp_edge.run.assessment.ask_quiz", ask_quiz)
        return left

    return set_replies


@pytest.mark.parametrize(
    ("active", "after", "verdict", "words"),
    [
        ((0, 0), (6, 6), "better", "answers 6 of 6 questions about your notes (0 before), and 6 of 6 with the note in"),
        ((6, 0), (6, 0), "better", "answers 6 of 6 questions"),
        ((0, 0), (4, 6), "no gain", "answers 4 of 6 questions"),
        ((0, 0), (6, 1), "reads worse", "1 of 6 with the note in the prompt (6 before): it reads worse"),
        ((6, 0), (5, 6), "better", "answers 5 of 6"),
    ],
)
def test_the_base_model_and_the_active_version_are_asked_too(make, reply, active, after, verdict, words):
    """In this order: the active version, the base model, the new one."""
    left = reply(active, (0, 6 if verdict == "reads worse" else 0), after)
    personalizer = make(after=True, recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES, fresh=True)
    assert left == []
    assert (result.verdict, result.active, result.compared_with) == (verdict, verdict == "better", 1)
    assert words in result.summary
    assert (result.quiz.right_active, result.quiz.right_after) == (active[0], after[0])
    assert personalizer.store.adapter("default").active() == (2 if verdict == "better" else 1)


def test_an_adapter_that_answers_less_than_the_active_one_does_not_replace_it(make, reply, monkeypatch):
    monkeypatch.setattr("sebp_edge.questions.examples.QUIZ_SHARE", 1.0)
    personalizer = make(after=True, recipe=NO_EFFECT)
    reply((12, 0), (0, 12), (6, 12))
    result = personalizer.adapt(NOTES, fresh=True)
    assert (result.verdict, result.active, result.quiz.right_active) == ("worse than active", False, 12)
    assert "answers 6 of 12 questions" in result.summary
    assert "but the version that is active answers 12." in result.summary
    assert personalizer.store.adapter("default").active() == 1


def test_an_active_version_that_cannot_be_asked_is_not_replaced(make, tmp_path):
    other = save_model(tmp_path / "other", make_tokenizer(), initializer_range=0.11)
    personalizer = make(after=True, model=other)
    result = personalizer.adapt(NOTES)
    assert (result.verdict, result.active, result.quiz.right_active) == ("not comparable", False, None)
    assert result.quiz.right_after >= 5
    words = "but version 1, which is active, could not be asked: it was made for another base model, micro."
    assert words in result.summary
    assert personalizer.store.adapter("default").active() == 1
    assert personalizer.store.adapter("default").open(2).record.explanation in result.summary
