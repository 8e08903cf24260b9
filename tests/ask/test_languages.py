"""Questions about German and Dutch notes find their passages, also among the other language's; other scripts do too."""

import tomllib
from pathlib import Path

import pytest

from sebp_edge.ask.answer import best_sentence, is_found
from sebp_edge.ask.index import Index
from sebp_edge.values.documents import Document

NOTES = {
    file.stem: tomllib.loads(file.read_text(encoding="utf-8"))["note"]
    for file in sorted(Path(__file__).with_name("notes").glob("*.toml"))
}
# One note in each language, a question in another form of its words, and the note that it must not be taken for.
OTHERS = [
    ("Ключ от хижины лежит под камнем, вход со двора.", "Где лежит ключ от хижину?", "Хижая птица сидит на камнях."),
    ("Ириной назначена встреча 3 мая в библиотеке.", "Что будет 2024-05-03?", "Встреча с Ириной была 4 мая."),
    ("Işık faturası 3 Mayıs'ta ödenecek, 412 lira.", "ışık faturasi ne zaman?", "Su faturası ödendi."),
    ("Fatura 3 Mayıs 2024.", "2024-05-03", "Fatura 3 Mart 2024."),
    ("La réunion avec Zoé est le 3 février à Orléans.", "Quand est la reunion a Orleans ?", "Orly, le 4 février."),
    ("Κλειδί κάτω από τη γλάστρα.", "που είναι το κλειδι;", "Η γάτα κοιμάται."),
    ("東京のホテルは新宿駅の近く。Zimmer 1204。", "Zimmer in 東京", "北京のホテル。Zimmer 7。"),
    ("명동 호텔 예약은 5월 3일입니다.", "호텔 예약", "부산 여행 계획."),
    ("मंगलवार को डॉक्टर से मिलना है।", "डॉक्टर कब?", "बुधवार को छुट्टी है।"),
]


def _index(notes: list[dict], prefix: str = "") -> Index:
    return Index(Document(prefix + note["name"], note["text"].strip(), note["name"]) for note in notes)


def _first(index: Index, question: str) -> str | None:
    return next((hit.passage.document for hit in index.search(question, 1)), None)


@pytest.mark.parametrize("language", NOTES)
def test_notes_in_a_language_are_found_and_not_refused(language):
    notes = NOTES[language]
    index = _index(notes)
    hits = [index.search(note["question"], 1) for note in notes]
    right = [hit for hit, note in zip(hits, notes, strict=True) if hit and hit[0].passage.document == note["name"]]
    assert len(notes) == 15 and len(right) >= 0.9 * len(notes)
    assert sum(map(is_found, right)) >= 0.75 * len(notes)
    quoted = [best_sentence(note["question"], hit[0].passage) for hit, note in zip(hits, notes, strict=True)]
    assert sum(note["answer"] in text for text, note in zip(quoted, notes, strict=True)) >= 0.8 * len(notes)


@pytest.mark.parametrize("language", NOTES)
def test_a_question_is_refused_once_its_note_is_gone(language):
    notes = NOTES[language]
    hits = [_index([each for each in notes if each is not note]).search(note["question"]) for note in notes]
    assert sum(map(is_found, hits)) <= 0.1 * len(notes)


def test_each_language_is_found_among_the_other():
    documents = [
        Document(f"{language}/{note['name']}", note["text"].strip(), note["name"])
        for language, notes in NOTES.items()
        for note in notes
    ]
    index = Index(documents)
    asked = [(language, note) for language, notes in NOTES.items() for note in notes]
    right = [_first(index, note["question"]) == f"{language}/{note['name']}" for language, note in asked]
    assert sum(right) >= 0.9 * len(asked)


@pytest.mark.parametrize("language", NOTES)
def test_questions_in_another_language_are_refused(language):
    index = _index(NOTES[language])
    asked = [
        "Which horsepower has my tractor?",
        "Wo steht das Teleskop?",
        "Hoe laat vertrekt de veerboot?",
        "トラクター",
    ]
    assert not any(is_found(index.search(question)) for question in asked)


@pytest.mark.parametrize(("text", "question", "other"), OTHERS)
def test_other_scripts_and_forms_are_found(text, question, other):
    assert _first(Index([Document("right.md", text), Document("other.md", other)]), question) == "right.md"
