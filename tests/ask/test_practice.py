"""Bundled notes can be read: each answer stands in its note once, and no question gives it away."""

import pytest

from sebp_edge.ask.answer import NUM_PASSAGES
from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.practice import PRACTICE, QUIZ, practice_questions, practice_reading
from sebp_edge.values.answers import is_right, stands_in

NOTES = {folder: practice_reading(folder).documents for folder in (PRACTICE, QUIZ)}
QUESTIONS = practice_questions() | practice_questions(QUIZ)


def test_there_are_practice_notes_of_each_setting_and_no_text_or_question_twice():
    assert len(NOTES[PRACTICE]) >= 30 * len(list(PRACTICE.glob("*.toml")))
    assert len(QUESTIONS) == sum(map(len, NOTES.values()))
    asked = [wording for each in QUESTIONS.values() for question in each for wording in question.wordings]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("note", "num_wordings"),
    [(note, wordings) for folder, wordings in ((PRACTICE, 3), (QUIZ, 1)) for note in NOTES[folder]],
    ids=lambda value: getattr(value, "name", ""),
)
def test_facts_are_asked_for_in_other_words(note, num_wordings):
    questions = QUESTIONS[note.content]
    assert len(questions) >= 4
    for question in questions:
        assert note.content.count(question.answer) == 1
        # Each is asked for below one passage.
        assert any(stands_in(question.answer, passage.text) for passage in passages_of(note))
        assert len(question.wordings) >= num_wordings
        assert not any(is_right(wording, [question.answer]) for wording in question.wordings)


def test_the_search_finds_the_notes_of_the_quiz_among_all():
    index = Index([*NOTES[PRACTICE], *NOTES[QUIZ]])
    for note in NOTES[QUIZ]:
        for question in QUESTIONS[note.content]:
            hits = index.search(question.wordings[0], NUM_PASSAGES)
            assert [hit.passage.document for hit in hits] == [note.source], question
