"""A quiz decides whether an adapter of the recipe `ask` is kept."""

import pytest
from reader_notes import NO_EFFECT

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


def test_the_base_model_and_the_active_version_are_asked_too(make):
    result = make(after=True).adapt(fresh=True)
    assert (result.verdict, result.active, result.compared_with) == ("better", True, 1)
    assert (result.quiz.right_active, result.quiz.right_before, result.quiz.right_after) == (5, 0, 5)
    assert "Of 5 questions about notes that it has not seen, it answers 5 right, 0 before" in result.summary
