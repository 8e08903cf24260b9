"""Practice notes can be read: each answer stands in its note once, and no question gives it away."""

import pytest

from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.practice import FOLDER, practice_questions, practice_reading
from sebp_edge.values.answers import is_right, stands_in

NOTES = practice_reading().documents


def test_there_are_notes_of_each_setting_and_no_text_or_question_twice():
    assert len(NOTES) == len(practice_questions()) >= 30 * len(list(FOLDER.glob("*.toml")))
    asked = [wording for each in practice_questions().values() for question in each for wording in question.wordings]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.name)
def test_facts_are_asked_for_in_other_words(note):
    questions = practice_questions()[note.content]
    assert len(questions) >= 4
    for question in questions:
        assert note.content.count(question.answer) == 1
        # Each is asked for below one passage.
        assert any(stands_in(question.answer, passage.text) for passage in passages_of(note))
        assert len(question.wordings) >= 3
        assert not any(is_right(wording, [question.answer]) for wording in question.wordings)
