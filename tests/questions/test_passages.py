"""A note is cut into short passages that together hold all it says."""

import re
import time
from pathlib import Path

import pytest

from sebp_edge.questions.notes import read_note
from sebp_edge.questions.passages import MAX_WORDS, passages_of, pieces

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "notes").rglob("*.md"))
LONG = (
    "We had counted on the boat, having talked of nothing else since the ferry, but the landing stage was roped off "
    "and the man there explained that nothing would go out all week, so we walked instead, which did my hip no good"
)


def texts(note: str) -> list[str]:
    return [passage.text for passage in passages_of(read_note(note, "note.md"))]


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("# Shed\n\nThe door sticks. Oil it in May.", ["The door sticks.", "Oil it in May."]),
        (
            "# Dentist\n\ntuesday 14:35. bring the form. park behind.",
            ["tuesday 14:35.", "bring the form.", "park behind."],
        ),
        ("# Shed\n\nPaint (approx. 3 tins) is inside.", ["Paint (approx. 3 tins) is inside."]),
        ("# Yard\n\nPrice: £71\nBoards: 52", ["Price: £71", "Boards: 52"]),
        ("# Trip\n\n> Dear both,\n> the fence leans.", ["Dear both, the fence leans."]),
        ("# Trip\n\nBring:\n\n- rope\n- two oars", ["Bring: rope", "Bring: two oars"]),
        (
            "# Hotels\n\n| place | night | rooms |\n|---|---|---|\n| Alba | £69 | 4 |\n| Mira | | 7 |",
            ["Alba, night: £69", "Alba, rooms: 4", "Mira, rooms: 7"],
        ),
        ("# Server\n\n```\nrm -rf x\n```\n\nPort 8080 is open.", ["Port 8080 is open."]),
    ],
)
def test_a_line_a_sentence_and_a_cell_are_passages(note, expected):
    assert texts(note) == expected


def test_a_passage_knows_its_heading():
    note = read_note("# Island\n\nFlat.\n\n## Harbour\n\nTwo piers.", "note.md")
    assert [(passage.text, passage.heading) for passage in passages_of(note)] == [
        ("Flat.", ""),
        ("Two piers.", "Harbour"),
    ]


def test_a_long_sentence_is_cut_between_its_clauses():
    found = pieces(LONG, MAX_WORDS)
    assert len(found) == 3 and all(len(piece.split()) <= MAX_WORDS for piece in found)
    assert all(piece.split()[0] in ("We", "but", "so", "and", "the", "that", "which") for piece in found)
    assert re.findall(r"\w+", " ".join(found)) == re.findall(r"\w+", LONG)


def test_what_stands_in_quotation_marks_is_not_cut():
    said = "and when we stood in the rain she turned round and looked at me, and then she said " + '"Onward, Napoleon"'
    assert any('"Onward, Napoleon"' in piece for piece in pieces(said, 12))


@pytest.mark.parametrize("words", [1, 20, 21, 400])
def test_a_sentence_without_clauses_is_cut_after_so_many_words(words):
    sentence = " ".join(f"w{number}" for number in range(words))
    found = pieces(sentence, MAX_WORDS)
    assert " ".join(found) == sentence and max(len(piece.split()) for piece in found) <= MAX_WORDS


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_words_of_a_note_stand_in_its_passages(path):
    note = read_note(path.read_text(encoding="utf-8"), path.name)
    words = {word for passage in passages_of(note) for word in re.findall(r"\w+", passage.text)}
    for section in note.sections:
        for sentence in section.sentences:
            assert words.issuperset(re.findall(r"\w+", sentence)), sentence


@pytest.mark.parametrize("text", ["", "\x00", "word " * 12_000, '"' * 5_000, "a, " * 20_000])
def test_strange_notes_are_cut_in_a_moment(text):
    assert all(len(piece.split()) <= MAX_WORDS for piece in texts(text))


@pytest.mark.parametrize("separator", [",", ";", "/"])
def test_a_line_without_spaces_is_cut_between_its_values(separator):
    """Each value of a passage is worded from all words of the passage."""
    values = [f"{number:04}" for number in range(4000)]
    found = texts(separator.join(values))
    assert max(map(len, found)) <= 100 * MAX_WORDS
    if separator != "/":
        assert set(values) <= set(re.findall(r"\d+", " ".join(found)))


def test_an_address_is_not_cut():
    address = "https://example.org/" + "a-long-name/" * 10
    assert any(address.rstrip("/") in text for text in texts(f"The boat is at {address} since May."))


def test_sentences_of_abbreviations_take_linear_time():
    begin = time.process_time()
    texts("e.g. " * 20_000)
    assert time.process_time() - begin < 2
