"""A question about several notes is answered with a sentence of each, in the order of the notes' dates."""

import pytest
from reading import write_file

from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.several import asks_for_several
from sebp_edge.run.asking import quote
from sebp_edge.values.documents import Document

NOTES = {
    "2024-05-02 ferry.md": "We take the ferry Aurora today, and the sea is flat.",
    "walk.md": "---\ndate: 2023-08-11\n---\nWe take the ferry Vrist over, with the bicycles.",
    "journal.md": "# 3 July 2025\n\nWe take the ferry Brage, late by an hour.\n",
    "undated.md": "Of every ferry that I take I like the Aurora best.",
    "soup.md": "Pea soup on Thursdays, with mustard and thyme.",
    **{f"shop {number}.md": f"Bought {number} nails and a brush for the shed door." for number in range(20)},
}


@pytest.fixture
def folder(tmp_path):
    for name, text in NOTES.items():
        write_file(tmp_path, name, text)
    return tmp_path


@pytest.mark.parametrize(
    "question",
    [
        "Which ferries did I take?",
        "When did I last dig?",
        "How often did we eat soup?",
        "Welche Fähren habe ich genommen?",
        "Wann war ich zuletzt beim Arzt?",
        "Quand ai-je nagé pour la dernière fois ?",
        "Quels livres ai-je lus ?",
    ],
)
def test_a_question_about_several_notes_is_told_from_others(question):
    assert asks_for_several(question)


@pytest.mark.parametrize(
    "question",
    [
        "Which bus goes there?",
        "Which cabin do we have?",
        "When is the dentist?",
        "Welche Version läuft?",
        "Where is it?",
    ],
)
def test_a_question_about_one_thing_is_not(question):
    assert not asks_for_several(question)


def test_sentences_come_in_the_order_of_the_notes_dates_and_undated_ones_last(folder):
    answer = quote("Which ferries did I take?", folder)
    assert [each.document for each in answer.sources] == ["walk.md", "2024-05-02 ferry.md", "journal.md", "undated.md"]
    assert [each.date for each in answer.sources] == ["2023-08-11", "2024-05-02", "2025-07-03", ""]
    lines = answer.text.split("\n")
    assert len(lines) == len(answer.sentences) == 4
    assert lines[0].startswith("2023-08-11 We take the ferry Vrist") and lines[3].startswith("Of every ferry")
    assert answer.quoted and answer.sentence == answer.sentences[0] and answer.line == 4


def test_when_something_was_last_begins_with_the_latest(folder):
    assert quote("When did we last take a ferry?", folder).sources[0].document == "journal.md"


def test_a_question_about_one_note_is_answered_with_one_sentence(folder):
    answer = quote("Which spices belong in the pea soup?", folder)
    assert answer.sentences == () and answer.text == "Pea soup on Thursdays, with mustard and thyme."


def test_a_heading_dates_a_passage_rather_than_the_name_of_its_file():
    text = "# 3 July 2025\n\n" + "One day. " * 60 + "\n\n# 4 July 2025\n\n" + "Another day. " * 60
    dates = [each.date for each in passages_of(Document("2024_01_01.md", text, "2024_01_01.md"))]
    assert dates[0] == "2025-07-03" and dates[-1] == "2025-07-04"


def test_no_model_reads_what_is_listed_or_not_there(folder):
    assert quote("Which ferries did I take?", folder).is_final
    assert quote("Who sails the submarine?", folder).is_final
    assert not quote("Which spices belong in the pea soup?", folder).is_final
