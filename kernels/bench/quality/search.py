"""Measures how often `ask` finds the note that answers a question, and how often it says rightly that there is none.

    python kernels/bench/quality/search.py [--seeds 0 1 2] [--public FOLDER] [--record [FILE]]

The questions are those of invented people who are for testing only. Each person's notes are searched alone, filled up
by the same generator with subjects of other people, and with --public filled up with the Markdown files of a folder. A
question is answered by its note if the passage found has an accepted answer. Questions without an answer are those of
the others who are for testing. The index is made of texts that were read before.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import know_people, quizzes
from quality.know_people import Note, Person
from quality.quizzes import Question
from sebp_edge.ask.answer import best_sentence, is_found
from sebp_edge.ask.index import Hit, Index
from sebp_edge.reading.readers import read_texts
from sebp_edge.values.documents import Document
from sebp_edge.values.folder import Folder

SOURCES = (
    "sebp_edge/ask",
    "sebp_edge/reading/formats/front_matter.py",
    "sebp_edge/reading/formats/notes.py",
    know_people.TUNING,
    know_people.TEST,
    know_people.__file__,
    quizzes.__file__,
    __file__,
)
NUM_OWN = 60
# What a person's notes are filled up with, and to how many.
FOLDERS = (("alone", 20), ("alone", 60), ("generated", 200), ("generated", 1000), ("public", 200), ("public", 1000))


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--public", type=Path, help="folder of Markdown notes to fill up with")
    options = parser.parse_args(arguments)
    public = read_texts(Folder(options.public, include=("*.md",))).documents if options.public else []
    people = [know_people.person(seed, NUM_OWN) for seed in options.seeds]
    rows = [evidence.show(row) for row in measured(people, public)]
    evidence.record("search", SOURCES, rows, options.record, on_cpu=True)


def measured(people: list[Person], public: list[Document]) -> Iterator[dict]:
    """Yields a row for each person and each folder."""
    for person in people:
        others = [asked for other in people if other is not person for asked in other.quiz]
        for fill, size in FOLDERS:
            documents = [as_document(note) for note in person.notes[:size]]
            if fill == "generated":
                documents = filled(documents, generated(person), size)
            elif fill == "public":
                documents = filled(documents, random.Random(person.name).sample(public, len(public)), size)
            if fill != "public" or public:
                yield {"use": "test", "person": person.name, "fill": fill, **measure(documents, person, others)}


def measure(documents: list[Document], person: Person, others: list[Question]) -> dict:
    """The shares of questions, and what the index takes."""
    begin = time.process_time()
    index = Index(documents)
    seconds = time.process_time() - begin
    names = {document.source for document in documents}
    quiz = [asked for asked in person.quiz if asked.document in names]
    begin = time.process_time()
    found = [index.search(asked.question) for asked in quiz]
    search_ms = 1000 * (time.process_time() - begin) / len(found)
    right = [[answers(hit, asked) for hit in hits] for hits, asked in zip(found, quiz, strict=True)]
    quoted = [
        any(quizzes.stands_in(each, best_sentence(asked.question, hits[0].passage)) for each in asked.answers)
        for hits, asked, is_right in zip(found, quiz, right, strict=True)
        if is_right[:1] == [True]
    ]
    without = [index.search(asked.question) for asked in others if asked.document not in names]
    return {
        "notes": len(documents),
        "passages": len(index),
        "questions": len(found),
        "first": sum(hits[:1] == [True] for hits in right) / len(right),
        "among_five": sum(map(any, right)) / len(right),
        "quoted": sum(quoted) / len(quoted),
        "wrongly_refused": refused(found),
        "unanswerable": len(without),
        "rightly_refused": refused(without),
        "index_seconds": round(seconds, 3),
        "search_ms": round(search_ms, 2),
    }


def refused(found: list[list[Hit]]) -> float:
    return round(sum(not is_found(hits) for hits in found) / len(found), 4)


def answers(hit: Hit, asked: Question) -> bool:
    """Whether a passage is of the right note and has an accepted answer."""
    text = hit.passage.text
    return hit.passage.document == asked.document and any(quizzes.stands_in(each, text) for each in asked.answers)


def as_document(note: Note) -> Document:
    return Document(note.file, note.text.strip(), note.file)


def filled(own: list[Document], others, size: int) -> list[Document]:
    """The notes, filled up with others of other names."""
    found = {document.source: document for document in own}
    for document in others:
        if len(found) == size:
            break
        found.setdefault(document.source, document)
    return list(found.values())


def generated(person: Person) -> Iterator[Document]:
    """Yields notes of any kind about subjects of people who are not for testing."""
    draw = random.Random(person.name)
    written = [know_people.written(file) for file in (know_people.TUNING, know_people.TEST)]
    everyone = [(kind, people, words) for people, kinds, words in written for kind in kinds]
    subjects = sorted({each for kind in written[0][1] for each in kind["subjects"]})
    while True:
        kind, people, words = draw.choice(everyone)
        values = know_people.Values(draw, people[draw.choice(kind["who"])]["constants"], words)
        try:
            note, _ = know_people.note_of(kind, draw.choice(subjects), values)
        except IndexError:
            continue  # the kind has more values than its list
        yield as_document(note)


if __name__ == "__main__":
    main()
