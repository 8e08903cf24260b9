"""The quiz asks about the practice notes of the test split, and about its own notes."""

import pytest
from builders import make_tokenizer
from reader_notes import NOTES, make_note

from sebp_edge.ask import practice
from sebp_edge.ask.make_quiz import REPLY_TOKENS, make_quiz

OWN = tuple(map(make_note, ("stove", "sofa", "globe", "wardrobe")))
TESTED = {2, 5}


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.setattr(practice, "_written", {practice.PRACTICE: NOTES, practice.QUIZ: OWN}.__getitem__)
    return practice.practice_reading().documents


def test_it_asks_about_tested_practice_notes_and_all_of_its_own(documents):
    tokenizer = make_tokenizer()
    quiz = make_quiz(documents, TESTED, tokenizer, 512)
    tested = [NOTES[number] for number in sorted(TESTED)]
    assert [asked.question for asked in quiz.about_notes] == [note["facts"][0]["ask"][0] for note in (*tested, *OWN)]
    for asked, note in zip(quiz.about_notes, (*tested, *OWN), strict=True):
        assert asked.found == asked.right
        assert note["text"].strip() in tokenizer.decode(asked.found)
    # Without their notes, nothing is found.
    assert (quiz.refused, quiz.rightly_refused) == (0, len(quiz.about_notes))


def test_only_practice_notes_are_asked_about_without_a_passage(documents):
    tokenizer = make_tokenizer()
    alone = [asked.alone for asked in make_quiz(documents, TESTED, tokenizer, 512).about_notes]
    assert "samovar" not in tokenizer.decode(alone[0]) and "canoe" in tokenizer.decode(alone[0])
    assert alone[len(TESTED) :] == [()] * len(OWN)


def test_questions_that_leave_no_room_for_a_reply_are_left_out(documents):
    longest = max(len(asked.found) for asked in make_quiz(documents, TESTED, make_tokenizer(), 512).about_notes)
    kept = make_quiz(documents, TESTED, make_tokenizer(), longest + REPLY_TOKENS - 1).about_notes
    assert 0 < len(kept) < len(TESTED) + len(OWN)
