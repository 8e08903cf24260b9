"""Every value of an English note is asked for in keywords, however its sentence is made."""

import re
import time
from pathlib import Path

import pytest

from sebp_edge.questions.cues import _ASKS, MAX_QUESTIONS, NUM_WORDINGS, ask_by_cues

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "notes").rglob("*.md"))


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("Changed the lock on 6 May because the old one was stiff.", "6 May"),
        ("Changed the lock on 6 May because the old one was stiff.", "the old one was stiff"),
        ("Kept behind the flour, second shelf.", "behind the flour"),
        ("Bought at Miller's for 40 euros.", "40 euros"),
        ("Paid £20 for it.", "£20"),
        ("Serial number AB-4711, do not lose it.", "AB-4711"),
        ("The train leaves at 7:30 on Tuesdays.", "7:30"),
        ("Written by Olga Brandt in pencil.", "Olga Brandt"),
        ("It is called Miss Pepper.", "Miss Pepper"),
        ("Theme: submarines. Cake from the shop.", "submarines"),
        ("Found a loose earth wire in the plug.", "a loose earth wire"),
    ],
)
def test_values_are_asked_for(sentence, answer):
    questions = ask_by_cues(f"# The old shed\n\n{sentence} It was the day of the storm and we went home.")
    assert answer in [question.answer for question in questions]


def notes() -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in EXAMPLES]


def test_answers_stand_in_the_note_and_no_question_has_its_answer():
    asked = [(note, question) for note in notes() for question in ask_by_cues(note, "note")]
    assert len(asked) > 300
    for note, question in asked:
        plain = re.sub(r"[*_`\[\]\s]+", " ", note)
        assert question.answer in plain or question.answer.split()[0] in plain
        assert 2 <= len(question.wordings) <= NUM_WORDINGS
        assert len(set(question.wordings)) == len(question.wordings)
        # An answer may be a clause, and "which thing" asks for a thing.
        values = words(question.answer) - words(" ".join(ask for asks in _ASKS.values() for ask in asks))
        keywords = [wording for wording in question.wordings if "___" not in wording]
        assert not any(values & words(wording) for wording in keywords), question


def words(text: str) -> set[str]:
    return {word for word in re.findall(r"[\w'’-]+", text.casefold()) if len(word) > 3}


def test_the_same_note_has_the_same_questions():
    for note in notes()[:10]:
        assert ask_by_cues(note, "name") == ask_by_cues(note, "name")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word",
        "\x00\x01",
        "```\nx = 1\n```",
        "Der Schlüssel liegt unter der Matte, sagt Anna am 3. Mai.",
        "鍵は庭にあります。",
        "😀 😀 😀",
        "the of and to in is was on for with at",
    ],
)
def test_texts_without_english_facts_have_few_questions_and_no_error(text):
    assert len(ask_by_cues(text, None)) <= 2


def test_a_long_note_takes_bounded_time_and_has_a_bounded_number():
    text = "# Log\n\n" + "Anna paid 40 euros to Miller on 3 May in the old harbour because it rained. " * 3000
    begin = time.process_time()
    assert len(ask_by_cues(text)) <= MAX_QUESTIONS
    assert time.process_time() - begin < 10
