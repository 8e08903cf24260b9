"""Measures how often `ask` finds the note that answers a question, and how often it says rightly that there is none.

    python kernels/bench/quality/search.py [--seeds 0 1 2] [--public FOLDER] [--authors FOLDER] [--kept]
                                           [--record [FILE]]

The easy case: the questions are those of invented people who are for testing only. Each person's notes are searched
alone, filled up by the same generator with subjects of other people, and with --public filled up with the Markdown
files of a folder. A question is answered by its note if the passage found has an accepted answer. Questions without an
answer are those of the others who are for testing.

The hard case, with --authors: questions about public notes in words that these do not use, some of which nothing
answers (outside.py). The index is made of texts that were read before.
"""

import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import know_people, outside, quizzes
from quality.know_people import Note, Person
from quality.outside import Asked
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
    outside.__file__,
    __file__,
)
NUM_OWN = 60
# What a person's notes are filled up with, and to how many.
FOLDERS = (("alone", 20), ("alone", 60), ("generated", 200), ("generated", 1000), ("public", 200), ("public", 1000))


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--public", type=Path, help="folder of Markdown notes to fill up with")
    parser.add_argument("--authors", type=Path, help="folder with the public notes of fetch_authors.py")
    parser.add_argument("--kept", action="store_true", help="ask the kept questions, too")
    options = parser.parse_args(arguments)
    public = read_texts(Folder(options.public, include=("*.md",))).documents if options.public else []
    people = [know_people.person(seed, NUM_OWN) for seed in options.seeds]
    rows = [evidence.show(row) for row in measured(people, public)]
    for kept in (False, True)[: bool(options.authors) + options.kept]:
        rows += map(evidence.show, asked_from_outside(options.authors, "kept" if kept else "outside", kept))
    evidence.record("search", SOURCES, rows, options.record, on_cpu=True)


def asked_from_outside(authors: Path, use: str, kept: bool) -> Iterator[dict]:
    """Yields a row for each collection, one for all of them, and one for each kind of question."""
    collections = [outside.collection(authors, name, kept=kept) for name in outside.NAMES]
    found: list[tuple[Asked, list[Hit]]] = []
    for each in collections:
        begin = time.process_time()
        index = Index(each.documents)
        seconds = time.process_time() - begin
        begin = time.process_time()
        here = [(asked, index.search(asked.question)) for asked in each.asked]
        search_ms = 1000 * (time.process_time() - begin) / len(here)
        sizes = {"notes": len(each.documents), "passages": len(index)}
        times = {"index_seconds": round(seconds, 3), "search_ms": round(search_ms, 2)}
        yield {"use": use, "person": each.name, "fill": "all kinds", **sizes, **shares(here), **times}
        found += here
    yield {"use": use, "person": "all four", "fill": "all kinds", **shares(found)}
    for kind in sorted({asked.kind for asked, _ in found}):
        yield {"use": use, "person": "all four", "fill": kind, **shares([it for it in found if it[0].kind == kind])}


def shares(found: list[tuple[Asked, list[Hit]]]) -> dict:
    """Of the questions that have an answer and of the others: how many, and which share is right."""
    there = [(asked, hits) for asked, hits in found if asked.right]
    without = [hits for asked, hits in found if not asked.right]
    right = [[(hit.passage.document, hit.passage.line) in asked.right for hit in hits] for asked, hits in there]
    notes = [{document for document, _ in asked.right} for asked, _ in there]
    return {
        "questions": len(there),
        "first": share(each[:1] == [True] for each in right),
        "among_five": share(map(any, right)),
        "note_first": share(
            bool(hits) and hits[0].passage.document in those for (_, hits), those in zip(there, notes, strict=True)
        ),
        "quoted": share(
            bool(asked.accepted.search(best_sentence(asked.question, hits[0].passage)))
            for (asked, hits), each in zip(there, right, strict=True)
            if each[:1] == [True]
        ),
        "wrongly_refused": refused([hits for _, hits in there]),
        "unanswerable": len(without),
        "rightly_refused": refused(without),
    }


def share(which: Iterable[bool]) -> float | None:
    which = list(which)
    return round(sum(which) / len(which), 4) if which else None


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


def refused(found: list[list[Hit]]) -> float | None:
    return share(not is_found(hits) for hits in found)


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
