"""`ask` finds passages in notes of any language, and takes nothing in a question for an operator."""

import random
import sqlite3
import string
import threading

import pytest
from reading import read_texts, write_file

from sebp_edge.ask.answer import best_sentence, checked, is_found, stands_in
from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import MAX_CHARACTERS, Passage, passages_of
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.errors import MachineError, TextsError
from sebp_edge.values.documents import Conversation, Document, PromptCompletion

GERMAN = {
    "urlaub.md": "Die Hütte für den Urlaub ist im Tal, Nummer 12, und der Schlüssel liegt unter dem Stein.",
    "arzt.md": "Zahnarzttermin bei Dr. Müller am 4. März, und nicht vergessen: die Karte mitnehmen.",
    "reis.md": "Der Reis kocht mit zwei Tassen Wasser und einer Prise Salz.",
}
DUTCH = {
    "fiets.md": "De fiets staat in de schuur en het slot heeft code 4471.",
    "tandarts.md": "De tandartsafspraak is op dinsdag en wij gaan met de trein.",
}
CJK = {
    "東京.md": "東京のホテルは新宿駅の近くです。部屋は1204号室。",
    "医者.md": "歯医者は3月4日。iPhone15を持って行く。",
    "北京.md": "北京的餐厅在王府井,电话是5551234。",
    "ไทย.md": "ร้านอาหารไทยอยู่ใกล้สถานีรถไฟ เปิดทุกวัน",
}


def documents(texts: dict[str, str]) -> list[Document]:
    return [Document(name, text, name) for name, text in texts.items()]


def first(texts: dict[str, str], question: str) -> str | None:
    hits = Index(documents(texts)).search(question, 1)
    return hits[0].passage.document if hits else None


@pytest.mark.parametrize(
    ("texts", "question", "name"),
    [
        (GERMAN, "Wo ist der Schlüssel für die Hütte?", "urlaub.md"),
        (GERMAN, "Wann ist der Zahnarzt?", "arzt.md"),
        (GERMAN, "Dr. Muller", "arzt.md"),
        (GERMAN, "Was ist am 2024-03-04?", "arzt.md"),
        (DUTCH, "Welke code heeft het slot van de fiets?", "fiets.md"),
        (DUTCH, "Wanneer is de tandarts?", "tandarts.md"),
        (CJK, "東京", "東京.md"),
        (CJK, "東京のホテルはどこですか", "東京.md"),
        (CJK, "駅", "東京.md"),
        (CJK, "iphone15", "医者.md"),
        (CJK, "餐厅电话", "北京.md"),
        (CJK, "สถานีรถไฟ", "ไทย.md"),
        (CJK, "What about 2024-03-04?", "医者.md"),
    ],
)
def test_the_right_note_is_found_in_its_language(texts, question, name):
    assert first(texts, question) == name


def test_the_english_stemmer_is_used_on_english_only():
    english = {"a.md": "The cabins at the lake have been booked for the weekend.", "b.md": "The boat was sold."}
    assert first(english, "cabin") == "a.md"
    # Porter makes "reis" of "Reise".
    assert first(GERMAN, "Reise") is None


@pytest.mark.parametrize("question", ['"', "a AND", "NEAR(", "name: x*", "^(-", "*", "' OR 1=1 --", "{text}: a", "\0"])
def test_operators_and_quotes_are_words(question):
    assert Index(documents(GERMAN)).search(f"{question} Schlüssel {question}")[0].passage.document == "urlaub.md"
    Index(documents(GERMAN)).search(question)


def test_random_characters_and_2000_words_are_searched():
    draw = random.Random()
    index = Index(documents(GERMAN | CJK))
    for _ in range(30):
        index.search("".join(draw.choices(string.printable + "東京のกิ\u0301\ud7ff", k=draw.randint(0, 60))))
    words = ["".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(2000)]
    assert index.search(" ".join([*words, "Schlüssel"]))[0].passage.document == "urlaub.md"


def test_passages_hold_the_whole_text_and_say_where_they_stand():
    sections = [f"# Part {n}\n\n" + "\n\n".join(f"- item {n}.{m} {'word ' * 40}" for m in range(4)) for n in range(5)]
    text = "\n\n".join([*sections, "x" * 3000, "```\n# no heading\n```"])
    found = passages_of(Document("a.md", text, "a.md"))
    assert "".join("".join(each.text.split()) for each in found) == "".join(text.split())
    assert all(len(each.text) <= 2 * MAX_CHARACTERS for each in found)
    lines = text.split("\n")
    for each in found:
        assert lines[each.line - 1].startswith(each.text.split("\n")[0][:20])
    assert {each.headings for each in found if "item 3.3" in each.text} <= {(), ("Part 3",)}
    assert any(each.headings for each in found)


def test_records_and_chats_are_searched(tmp_path):
    chat = Conversation(
        ({"role": "user", "content": "Where is the spare key?"}, {"role": "assistant", "content": "Meter box."})
    )
    index = Index([Document("chat", chat), Document("record", PromptCompletion("Which colour is the boat?", "Teal"))])
    assert index.search("spare key")[0].passage.text.endswith("assistant: Meter box.")
    assert index.search("colour of the boat")[0].passage.document == "record"
    (tmp_path / "chat.txt").write_text(
        "".join(
            f"01/03/2024, 10:0{n} - {who}: {what}\n"
            for n, (who, what) in enumerate(
                [("Ana", "the cabin is number twelve"), ("Bo", "thanks"), ("Ana", "bring firewood"), ("Bo", "yes")]
            )
        )
    )
    hits = SearchedTexts().index(tmp_path).search("Which number has the cabin?")
    assert "Ana: the cabin is number twelve" in hits[0].passage.text


def test_the_index_follows_a_folder_that_changes(tmp_path):
    searched = SearchedTexts()
    with pytest.raises(TextsError, match="Nothing to read"):
        searched.index(tmp_path)
    (tmp_path / "a.md").write_text("The cabin is number 12.")
    (tmp_path / "b.md").write_text("The boat is teal.")
    assert searched.index(tmp_path).search("cabin")
    (tmp_path / "a.md").write_text("The lighthouse is open.")
    index = searched.index(tmp_path)
    assert not index.search("cabin") and index.search("lighthouse") and len(index) == 2
    (tmp_path / "b.md").unlink()
    assert not searched.index(tmp_path).search("boat")


@pytest.mark.parametrize(
    ("front", "question"),
    [
        ("---\ntags: [norway, cabins]\n---\n", "Which notes have the tag norway?"),
        ("---\ntags:\n  - norway\n---\n", "#norway"),
        ("---\naliases: [Fjord trip]\ndate: 2024-05-03\n---\n", "What did I write on 3 May?"),
        ("---\naliases: [Fjord trip]\n---\n", "fjord trip"),
        ('+++\ntitle = "Norway"\ndate = 2024-05-03\n+++\n', "May 3rd, 2024"),
    ],
)
def test_front_matter_is_searched(tmp_path, front, question):
    (tmp_path / "a.md").write_text(f"{front}# Packing\n\nTwo jumpers, one stove.")
    (tmp_path / "b.md").write_text("---\ntags: [spain]\ndate: 2024-05-04\n---\nThe tag on the suitcase came off.")
    searched = SearchedTexts()
    best = searched.index(tmp_path).search(question)[0].passage
    assert best.document == "a.md" and "jumpers" in best.text and best.line == 1
    (tmp_path / "a.md").write_text("Two jumpers, one stove.")
    assert all(hit.passage.document != "a.md" for hit in searched.index(tmp_path).search(question))
    assert best_sentence("What about jumpers?", best).startswith("Two jumpers")


def test_a_folder_that_changes_while_it_is_asked_about_gives_answers_or_a_sentence(tmp_path):
    searched, stop = SearchedTexts(), threading.Event()
    (tmp_path / "stays.md").write_text("The cabin is number 12.")

    def change():
        draw = random.Random()
        while not stop.is_set():
            path = tmp_path / f"{draw.randrange(9)}.md"
            path.unlink(missing_ok=True) if draw.random() < 0.5 else path.write_text("The boat is teal. " * 50)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(10):
            assert searched.index(tmp_path).search("Which cabin?")[0].passage.document == "stays.md"
    finally:
        stop.set()
        changing.join()
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(TextsError, match="Nothing to read"):
        searched.index(tmp_path)


@pytest.mark.parametrize("text", ["...", "\u0301", "x" * 5000, "---\n---\n---", "2024-02-31 99:99 13/13", "#", "| | |"])
def test_notes_of_almost_nothing_are_searched(text):
    index = Index(documents({"odd.md": text, "a.md": "The cabin is number 12."}))
    assert index.search("Which cabin?")[0].passage.document == "a.md"
    assert not is_found(Index(documents({"odd.md": text})).search("cabin", 1))
    assert all(best_sentence("cabin", passage) for passage in passages_of(Document("odd.md", text)))
    assert not Index().search("cabin") and not index.search("")


def test_a_follow_up_is_searched_with_the_question_before_it():
    index = Index(documents(GERMAN))
    assert not index.search("und wann?")
    assert index.search("und wann?", before="Zahnarzt")[0].passage.document == "arzt.md"


def test_what_is_not_in_the_notes_is_not_found():
    index = Index(documents(GERMAN))
    assert is_found(index.search("Wo liegt der Schlüssel für die Hütte?"))
    assert not is_found(index.search("What is the horsepower of my tractor?"))
    assert not is_found(index.search("???"))


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("What does FERN stand for?", "fern.md"),
        ("What is the name of the kayak?", "boat.md"),
        ("What is the name of my dog?", None),
        ("What is my dog called?", None),
    ],
)
def test_words_for_the_kind_of_thing_that_is_asked_for_say_little(question, name):
    notes = {
        "fern.md": "FERN: Forest Ecology Research Network, the group that Ilse leads. We meet on Tuesdays.",
        "boat.md": "The kayak is in the shed behind the house, on the upper hooks.",
        "club.md": "A list with the name of each member, called the book, hangs beside the door of the club.",
        "soup.md": "Lentils, carrots and a bay leaf, for an hour.",
    }
    hits = Index(documents(notes)).search(question)
    assert (hits[0].passage.document if is_found(hits) else None) == name


@pytest.mark.parametrize(
    ("reply", "text", "right"),
    [
        ("4 March 2024", "Booked for 2024-03-04.", True),
        ("03/04", "Booked for 4 March.", True),
        ("5 March 2024", "Booked for 2024-03-04.", False),
        ("4 March 2023", "Booked for 2024-03-04.", False),
        ("1200", "It costs 1,200 euros.", True),
        ("1,300", "It costs 1,200 euros.", False),
        ("6.40 pm", "It starts at 18:40.", True),
        ("The cabin is number 12.", "cabin: 12", True),
        ("Paris", "cabin: 12", False),
        ("Which cabin?", "cabin: 12", False),
        ("1204", "部屋は1204号室", True),
        ("7", "We picked 7 apricots.", True),
        ("3", "3 out of 5 stars", True),
        ("12. Juni", "Gespräch am 12.6. um 14 Uhr", True),
        ("1 januari 2025", "De huur stijgt op 1-1-2025.", True),
        ("3 мая", "Встреча 2024-05-03", True),
        ("4 mayıs", "3 Mayıs 2024", False),
    ],
)
def test_a_reply_stands_in_a_text_in_any_form_of_its_value(reply, text, right):
    assert stands_in(reply, "Which cabin?", text) is right


def test_a_reply_that_is_nowhere_gives_way_to_a_sentence():
    passages = tuple(passages_of(Document("a.md", "We drive on Friday. The cabin is number 12. Bring wood.", "a.md")))
    answer = checked("Number 99", 0.9, "Which cabin?", passages)
    assert answer.quoted and answer.text == "The cabin is number 12." and answer.sources == passages
    assert not checked("12", 0.5, "Which cabin?", passages).quoted
    assert checked("12", 0.49, "Which cabin?", passages) == checked("", 0.0, "Which cabin?", passages)


@pytest.mark.parametrize(
    ("question", "text", "sentence"),
    [
        ("cabin", "One line", "One line"),
        ("cabin", "# Cabin", "# Cabin"),
        ("Which cabins?", "# Cabins\n\nWood.\n\nThe cabin is red.", "The cabin is red."),
        ("Where is the cabin?", "The cabin\nNext to the old mill at the lake.", "Next to the old mill at the lake."),
        ("When is the cabin ours?", "The cabin is red and ours. Ours from 4 March.", "Ours from 4 March."),
        ("Who has the cabin now?", "We have the cabin now. After that Sorcha has it.", "After that Sorcha has it."),
        ("How many people does the cabin sleep?", "The cabin has a stove. It sleeps 12.", "It sleeps 12."),
        (
            "Wann gehört die Hütte uns?",
            "Rot: die Hütte. Frei ist sie für uns erst ab 3. Mai.",
            "Frei ist sie für uns erst ab 3. Mai.",
        ),
        ("When is the cabin ours?", "---\ndate: 2024-05-03\n---\nThe cabin is ours now.", "The cabin is ours now."),
        ("cabin", "---\ntags: [cabin]\n---", "tags: [cabin]"),
        ("What about 4 March, when is it?", "4 March it is, as ever. Maybe on 5 March.", "Maybe on 5 March."),
    ],
)
def test_the_quoted_sentence_says_what_the_question_asks_for(question, text, sentence):
    assert best_sentence(question, Passage("cabin.md", (), 1, text)) == sentence


def test_a_python_without_fts5_gets_a_sentence(monkeypatch):
    class Without(sqlite3.Connection):
        def execute(self, sql, *rest):
            if "fts5" in sql:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(sql, *rest)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Without, **k))
    with pytest.raises(MachineError, match="FTS5"):
        Index()


def test_an_alias_of_a_page_of_logseq_is_found(tmp_path):
    write_file(tmp_path, "logseq/config.edn", "{}")
    write_file(tmp_path, "pages/Tools.md", "alias:: Instruments\n\n- The saw hangs on the wall.")
    write_file(tmp_path, "pages/Soup.md", "- Lentils and carrots.")
    index = Index()
    index.update(read_texts(tmp_path).documents)
    assert index.search("Where are the instruments?")[0].passage.document == "pages/Tools.md"
