"""Practice notes can be learnt from: each answer stands in its note, and no question gives it away."""

import pytest

from sebp_edge.questions.answers import is_right
from sebp_edge.questions.practice import FOLDER, KEYWORDS, practice_notes
from sebp_edge.texts.examples import TURNS

NOTES = practice_notes()


def test_there_are_notes_of_each_setting_and_no_text_or_question_twice():
    assert len(NOTES) == len({note.text for note in NOTES}) >= 30 * len(list(FOLDER.glob("*.toml")))
    asked = [wording for note in NOTES for question in note.questions for wording in question.wordings]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.text[:30].strip())
def test_facts_are_asked_for_in_other_words_and_in_keywords(note):
    assert len(note.questions) >= 4
    for question in note.questions:
        assert note.text.count(question.answer) == 1 and len(question.wordings) >= TURNS
        assert not any(is_right(wording, question.answer) for wording in question.wordings)
    in_keywords = note.in_keywords()
    assert in_keywords
    for cue in in_keywords:
        assert len(cue.wordings) <= TURNS * KEYWORDS
        assert any(is_right(cue.answer, question.answer) for question in note.questions)
