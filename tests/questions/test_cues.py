"""Every value of an English note is asked for in keywords, however its sentence is made."""

import re
import time
from pathlib import Path

import pytest

from sebp_edge.questions.cue_values import Cue
from sebp_edge.questions.cue_wordings import NUM_WORDINGS
from sebp_edge.questions.cues import ASKS, FEW_QUESTIONS, MAX_QUESTIONS, ask_by_cues

NAMES = "red blue green big small old new warm cold low high wet dry thin thick round flat sharp dull".split()  # noqa: SIM905
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


@pytest.mark.parametrize(
    ("sentence", "answer", "begins"),
    [
        ("Length 257 cm, out of square.", "257 cm", "How long"),
        ("She has kept it going for 61 years.", "61 years", "How long"),
        ("Lost about 65 per cent of the crop.", "65 per cent", "What share"),
        ("It stopped on a Sunday, naturally.", "on a Sunday", "When"),
        ("Ready in three weeks, he says.", "in three weeks", "When"),
        ("Took 38 jars of honey off it.", "38 jars", "How many jars"),
        ("It used 15 litres of paint.", "15 litres", "How much"),
        ("Left at 21:20 from the pier.", "21:20", "What time"),
        ("Amadou lives at 65 Pilgrim Street.", "65 Pilgrim Street", "Where"),
        ("Upstairs at Moonraker, Shambles Lane.", "Shambles Lane", "Where"),
        ("From Southdown, for nothing.", "Southdown", "From whom"),
        ("For Grainne only, never the others.", "Grainne", "Who"),
        ("Told Merle and nobody else.", "Merle", "Who"),
        ("Moved because of the auditors.", "the auditors", "Why"),
        ("The fault had been dried gel.", "dried gel", "What"),
        ("New code of the alarm: 1238.", "1238", "What"),
        ("Oil: 380 ml, no more.", "380 ml", "How much"),
    ],
)
def test_a_value_is_asked_for_as_what_it_is(sentence, answer, begins):
    (question,) = [each for each in ask_by_cues(f"# The old shed\n\n{sentence}") if each.answer == answer]
    assert question.wordings[0].startswith(f"{begins} ")


@pytest.mark.parametrize(
    "sentence", ["Lost it on the way to Mr Hill's.", "Told nobody, it was right.", "The way back.", "Two pieces broke."]
)
def test_verbs_owners_and_empty_words_are_no_values(sentence):
    answers = {each.answer for each in ask_by_cues(f"# The old shed\n\n{sentence} We went home in the rain that day.")}
    assert not answers & {
        "Lost",
        "Told",
        "Mr Hill's",
        "to Mr Hill's",
        "right",
        "The way",
        "The way back",
        "back",
        "Two",
    }


def test_the_title_is_no_value():
    answers = {each.answer for each in ask_by_cues("# First week\n\nMoses had the first week on 23 August.")}
    assert answers == {"Moses", "23 August"}


def test_a_title_and_the_name_of_a_file_are_both_used():
    questions = ask_by_cues("# First week\n\nMoses came by ferry on 23 August, late.", "apprentice-notes.md")
    wordings = [wording for each in questions for wording in each.wordings]
    assert any("first week" in wording.lower() for wording in wordings)
    assert any("apprentice" in wording.lower() for wording in wordings)


def notes() -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in EXAMPLES]


def test_answers_stand_in_the_note_and_no_question_has_its_answer():
    asked = [(note, question) for note in notes() for question in ask_by_cues(note, "note")]
    assert len(asked) > 300
    for note, question in asked:
        if not any("___" in wording for wording in question.wordings):
            continue  # the answer is a passage, and is asked for with its own words
        plain = re.sub(r"[*_`\[\]\s]+", " ", note)
        assert question.answer in plain or question.answer.split()[0] in plain
        assert 2 <= len(question.wordings) <= NUM_WORDINGS
        assert len(set(question.wordings)) == len(question.wordings)
        # An answer may be a clause, and "which thing" asks for a thing.
        values = words(question.answer) - words(" ".join(ask for asks in ASKS.values() for ask in asks))
        values -= words(Cue("", question.answer, "", 0, 0).unit)  # "how many jars"
        values -= {"about", "with", "does"}  # small words of a wording
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


def test_of_a_long_note_the_end_is_asked_about_too():
    days = "".join(f"The {name} boat lay at the pier on {day} May. " for day, name in enumerate(NAMES, start=1))
    questions = ask_by_cues(f"# Log\n\n{days}The fee was £71.")
    assert FEW_QUESTIONS < len(questions) <= MAX_QUESTIONS
    assert "£71" in [question.answer for question in questions]


def test_values_that_may_be_anything_give_way_to_others():
    things = "".join(f"There was a {name} box by the {name} wall. " for name in NAMES)
    answers = [question.answer for question in ask_by_cues(f"# Log\n\n{things}Anna paid £71 on 3 May.")]
    assert {"£71", "3 May"} <= set(answers)


def test_code_is_not_asked_about():
    questions = ask_by_cues("# Log\n\nAnna came on 3 May by boat.\n\n```\nsleep 4711 seconds\n```\n")
    assert "3 May" in [question.answer for question in questions]
    assert not any("4711" in question.answer for question in questions)


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [("Came on the 09.12 train with stones.", "09.12"), ("Play of 2.1 millimetres, a limit of 2.5 for us.", "2.5")],
)
def test_numbers_stay_whole(sentence, answer):
    answers = [question.answer for question in ask_by_cues(f"# The old shed\n\n{sentence} We went home that day.")]
    assert answer in answers


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("Warn Lotte: the boy swells up from celery.", "celery"),
        ("She turned away from everything apart from cold porridge.", "cold porridge"),
        ("Spare key → log basket, at the back.", "log basket"),
        ('He laughed and said "Onward, Napoleon" to the horse.', "Onward, Napoleon"),
        ("Stick to 5.0.11, later ones lose the order.", "5.0.11"),
        ("If it waits for the lock, remove queue.pid and start again.", "queue.pid"),
        ("REV. APPT 8 March, TAKE SAMPLE.", "8 March"),
        ("It all went downhill after the row with Eoin.", "the row with Eoin"),
        ("Folding stool from the shop.", "Folding stool"),
    ],
)
def test_values_without_an_article_or_a_sentence_are_asked_for(sentence, answer):
    assert answer in [question.answer for question in ask_by_cues(f"# The old shed\n\n{sentence}")]


def test_what_is_unique_in_a_note_is_asked_for_by_its_title_alone():
    (date,) = [each for each in ask_by_cues("# Old shed\n\nBuilt by hand on 6 May.") if each.answer == "6 May"]
    two = ask_by_cues("# Old shed\n\nBuilt by hand on 6 May. Painted in the rain on 9 May.")
    assert any(not words(wording) & {"built", "hand"} for wording in date.wordings)
    for question in two:
        if question.answer in ("6 May", "9 May"):
            assert all(words(wording) & {"built", "hand", "painted", "rain"} for wording in question.wordings)


def test_a_heading_names_what_stands_below_it():
    asked = ask_by_cues("# Islands\n\nTwo of them.\n\n## Gunhild\n\nThe ferry takes fifty-two cars in winter.")
    (cars,) = [each for each in asked if each.answer == "fifty-two cars"]
    assert any("Gunhild" in wording for wording in cars.wordings)


def test_no_wording_belongs_to_two_questions():
    for note in notes():
        wordings = [wording for question in ask_by_cues(note, "name") for wording in question.wordings]
        assert len(set(wordings)) == len(wordings)


def test_a_long_note_takes_bounded_time_and_has_a_bounded_number():
    text = "# Log\n\n" + "Anna paid 40 euros to Miller on 3 May in the old harbour because it rained. " * 3000
    begin = time.process_time()
    assert len(ask_by_cues(text)) <= MAX_QUESTIONS
    assert time.process_time() - begin < 10
