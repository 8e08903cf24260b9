"""Rules make questions of a note: each has one answer, which stands in the note, and many wordings."""

import random
import re
import time
from pathlib import Path

import pytest

from sebp_edge.questions.cues import ask_by_cues
from sebp_edge.questions.question import MAX_ANSWER_WORDS
from sebp_edge.questions.rules import MAX_FACTS, ask
from sebp_edge.questions.wordings import MAX_WORDINGS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "notes").rglob("*.md"))

HOUSE = """---
title: Holiday house
tags: [home]
---
Address: 12 Shore Lane
Wi-Fi password: blue-heron-42

The garden gate opens with the code 4711. The ferry leaves at 7:30. Mrs. Doyle, our neighbour, has the spare key.

| Room | Colour |
|------|--------|
| Attic | green |
| Hall |  |

Packing list:
- towels
- candles
"""


def words(text: str) -> str:
    return " " + " ".join(re.findall(r"[^\W_]+", text.casefold())) + " "


def answers(text: str, name: str | None = None) -> dict[str, str]:
    return {wording: question.answer for question in ask(text, name) for wording in question.wordings}


def notes() -> list[str]:
    return [HOUSE, *(path.read_text(encoding="utf-8", errors="replace") for path in EXAMPLES)]


@pytest.mark.parametrize(
    ("text", "question", "answer"),
    [
        ("# Boiler\n\nAnna repairs the boiler.", "Who repairs the boiler?", "Anna"),
        ("# Boiler\n\nAnna repairs the boiler.", "What does Anna repair?", "the boiler"),
        ("# Boiler\n\nThe boiler was last serviced on 3 May 2024.", "When was the boiler last serviced?", "3 May 2024"),
        (
            "# Club\n\nThe club meets on the last Friday of each month.",
            "When does the club meet?",
            "the last Friday of each month",
        ),
        ("# Boiler\n\nIt stands behind the shed.", "Where does the boiler stand?", "behind the shed"),
        ("# Choir trip\n\nDeposit £40 paid to Margit.", "What was paid to Margit?", "deposit £40"),
        ("# Choir trip\n\nBus leaves at 7:15.", "About the choir trip: when does the bus leave?", "7:15"),
        ("# Choir trip\n\nBill leaves at 7:15.", "When does Bill leave?", "7:15"),
        ("# Seed swap\n\nLabel is copper.", "About the seed swap: what is the label like?", "copper"),
        ("# Boiler\n\nThe keys handed to Sam on 3 May.", "When were the keys handed to Sam?", "3 May"),
        ("# Soil\n\nSample sent 11 October.", "About the soil: when was the sample sent?", "11 October"),
        ("# Club\n\nWe met Wood again. Wood leaves at 7:15.", "When does Wood leave?", "7:15"),
        ("# Planks\n\nTwo pieces sent back.", "About the planks: what was sent back?", "two pieces"),
        ("# Garden gate\n\nCode: 4711", "What is the code of the garden gate?", "4711"),
        ("# Garden gate\n\nCode: 4711", "garden gate code?", "4711"),
        ("# Piano\n\nThe piano was built by Ibach in 1924.", "Who built the piano in 1924?", "Ibach"),
        ("# Piano\n\nThe piano costs 450 euros.", "How much does the piano cost?", "450 euros"),
        ("# Trip\n\nWe flew to Lisbon in 2019.", "In which year did we fly to Lisbon?", "2019"),
        ("# Dentist\n\nCall Dr. Lim on 3 May.", "When should I call Dr. Lim?", "3 May"),
        ("# Family\n\nKarin's birthday is 12 August.", "When is Karin's birthday?", "12 August"),
        ("# Family\n\nKarin is my sister. She lives in Lund.", "Who is Karin?", "my sister"),
        ("# Family\n\nKarin is my sister. She lives in Lund.", "Where does Karin live?", "in Lund"),
        ("# Bread\n\nBake the bread for 40 minutes.", "How long should I bake the bread?", "40 minutes"),
        ("# Pets\n\nErik sold Bo because he sneezed.", "Why did Erik sell Bo?", "he sneezed"),
        (
            "# Hives\n\nThere are three hives behind Olaf's barn.",
            "How many hives are there behind Olaf's barn?",
            "three",
        ),
    ],
)
def test_sentences_and_lines_are_asked_for(text, question, answer):
    assert answers(text).get(question) == answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the address of the holiday house?", "12 Shore Lane"),
        ("What is the Wi-Fi password of the holiday house?", "blue-heron-42"),
        ("About the holiday house: when does the ferry leave?", "7:30"),
        ("Who is Mrs. Doyle?", "our neighbour"),
        ("About the holiday house: what is the colour of Attic?", "green"),
        ("What is on the packing list in my notes on the holiday house?", "towels, candles"),
    ],
)
def test_front_matter_tables_and_lists_are_asked_for(question, answer):
    assert answers(HOUSE).get(question) == answer


def test_the_file_name_is_the_title_of_a_note_without_one():
    text = "Code: 4711"
    assert answers(text, "2024-05-03-garden-gate.md")["What is the code of the garden gate?"] == "4711"
    assert answers(text, "garden-gate") == answers(text, "notes/garden-gate.md")


def test_missing_cells_are_not_asked_for():
    assert not any("Hall" in wording for wording in answers(HOUSE))


def test_every_answer_stands_in_its_note():
    for text in notes():
        for question in ask(text):
            assert words(question.answer) in words(re.sub(r"\]\([^)]*\)", "", text)), question


def test_no_wording_gives_the_answer_away():
    for text in notes():
        for question in ask(text):
            for wording in (*question.wordings, *question.kept_out):
                assert words(question.answer) not in words(wording), question


def test_kept_out_wordings_are_never_trained_on():
    trained = {wording for text in notes() for question in ask(text) for wording in question.wordings}
    kept_out = {wording for text in notes() for question in ask(text) for wording in question.kept_out}
    assert kept_out
    assert not kept_out & trained
    assert not any(re.search(r"I would like to know|could you check", wording, re.IGNORECASE) for wording in trained)


def test_most_questions_have_many_wordings_and_two_that_are_kept_out():
    questions = [question for text in notes() for question in ask(text)]
    assert len(questions) > 300
    assert sum(len(question.wordings) >= 8 for question in questions) > 0.8 * len(questions)
    assert sum(len(question.kept_out) == 2 for question in questions) > 0.8 * len(questions)
    for question in questions:
        assert 1 <= len(question.wordings) <= MAX_WORDINGS
        assert len(set(question.wordings)) == len(question.wordings)
        assert len(question.kept_out) in (0, 2)


def test_a_wording_has_one_answer():
    for text in notes():
        asked = [wording for question in ask(text) for wording in (*question.wordings, *question.kept_out)]
        assert len(set(asked)) == len(asked)


def test_answers_are_short_unless_they_say_what_a_note_is_about():
    for text in notes():
        for question in ask(text):
            assert len(words(question.answer).split()) <= MAX_ANSWER_WORDS or question.kept_out == ()


def test_a_note_has_a_limited_number_of_questions():
    text = "# List\n\n" + "\n".join(f"Person number {number} code: {number * 7919}" for number in range(500))
    assert MAX_FACTS <= len(ask(text)) <= MAX_FACTS + 1


def test_the_same_note_has_the_same_questions():
    for text in notes()[:5]:
        assert ask(text, "name") == ask(text, "name")


def test_windows_line_ends_change_nothing():
    assert ask(HOUSE.replace("\n", "\r\n")) == ask(HOUSE)


def test_contradicting_facts_are_not_asked_for():
    text = "# Gate\n\nCode: 4711\nCode: 1234\nOwner: Anna Berg"
    assert set(answers(text).values()) == {"Anna Berg"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t\n",
        "word",
        "# Title",
        "https://example.com/a?b=c",
        "```python\nkey: value\nx = 1\n```",
        "---\n---\n",
        "---",
        "| |\n|-|\n| |",
        "🙂🙂🙂",
        "***",
        "He said so.",
        "It is.",
        "\x00\x00",
        ", Anna repairs the boiler.",
        "Second set of keys with Gisela.",
    ],
)
def test_notes_without_facts_have_no_questions(text):
    assert ask(text) == []


def test_other_languages_are_asked_in_their_own_words():
    questions = ask("# Heizung\n\nHersteller: Viessmann\nDie Heizung steht im Keller.\n")
    assert [question.answer for question in questions] == ["Viessmann"]
    for wording in (*questions[0].wordings, *questions[0].kept_out):
        assert re.findall(r"[^\W_]+", wording) == ["Heizung", "Hersteller"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("# 庭の門\n\n暗証番号：四七一一\n", "四七一一"),
        ("# بوابة الحديقة\n\nالرمز: 4711\n", "4711"),
        ("# Ворота\n\nКод: 4711\n", "4711"),
        ("# 🙂 Hütte\n\nSchlüssel: beim Nachbarn\n", "beim Nachbarn"),
    ],
)
def test_every_script_can_be_asked_for(text, answer):
    (question,) = ask(text)
    assert question.answer == answer
    assert len(question.wordings) >= 6
    assert len(question.kept_out) == 2


@pytest.mark.parametrize(
    "text",
    [
        HOUSE * 300,
        "a" * 200_000,
        "a " * 100_000,
        "[[" * 100_000,
        "**" * 100_000,
        "| a " * 50_000,
        "- x\n" * 50_000,
        "Anna and " * 22_000,
        "3 May, " * 28_000,
        "x: " * 66_000,
        "(" * 200_000,
    ],
    ids=lambda text: text[:8].strip(),
)
def test_long_notes_take_little_time(text):
    begin = time.process_time()
    assert len(ask(text)) <= MAX_FACTS + 1
    assert time.process_time() - begin < 5


def test_null_bytes_do_not_matter():
    assert ask(HOUSE.replace("\n", "\x00\n")) == ask(HOUSE)


@pytest.mark.parametrize("name", ["Jonas", "Ines", "Phineas", "James"])
def test_names_that_look_like_plurals_are_persons(name):
    questions = ask(f"# The freezer\n\n{name} repaired the freezer on 12 May. It is loud.", None)
    about_the_name = [question for question in questions if question.answer == name]
    assert about_the_name and all("Who" in question.wordings[0] for question in about_the_name)


@pytest.mark.parametrize(
    "text",
    [
        "# Safe\n\nOnly Mr Lindqvist and I know that.",
        "# Safe\n\nAnna said that.",
        "# Safe\n\nWe moved the safe because.",
        '# Safe\n\n" " was moved to the hall.',
    ],
)
def test_sentences_may_end_where_more_is_expected(text):
    assert all(question.answer.strip() for question in ask(text))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_garbled_notes_are_read(seed):
    draw = random.Random(seed)
    for text in notes():
        tokens = [token for token in text.split(" ") if draw.random() > 0.1]
        for _ in range(len(tokens) // 10):
            first, second = draw.randrange(len(tokens)), draw.randrange(len(tokens))
            tokens[first], tokens[second] = tokens[second], tokens[first] + draw.choice("\n.,;:!?()\"'–-")
        garbled = " ".join(tokens)
        for question in [*ask(garbled), *ask_by_cues(garbled)]:
            assert question.answer.strip() and all(wording.strip() for wording in question.wordings)
