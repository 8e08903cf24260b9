"""Measures how often `ask` finds the note that answers a question, and how often it says rightly that there is none.

    python kernels/bench/quality/search.py [--seeds 0 1 2] [--public FOLDER] [--record [FILE]]

The questions are those of invented people. Those of know_kinds_tuning.toml, know_kinds_varied.toml and the practice
notes are for development: the threshold was chosen with them. Those of know_kinds_test.toml are for testing only. Each
person's notes are searched alone, filled up by the same generator with subjects of other people, and with --public
filled up with the Markdown files of a folder. A question is answered by its note if the passage found has an accepted
answer. Questions without an answer are those of the other people of the same file. The index is made of texts that were
read before.
"""

import argparse
import random
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import know_people, quizzes
from quality.know_people import KINDS, Note, Person
from quality.quizzes import Question
from sebp_edge.ask.answer import MIN_STRENGTH, best_sentence
from sebp_edge.ask.index import Hit, Index
from sebp_edge.texts.documents import Document
from sebp_edge.texts.folders import Folder
from sebp_edge.texts.readers import read_texts

PRACTICE = sorted(Path(evidence.ROOT, "sebp_edge/questions/practice").glob("*.toml"))
SOURCES = (
    "sebp_edge/ask",
    "sebp_edge/texts/formats/front_matter.py",
    "sebp_edge/texts/formats/notes.py",
    *KINDS.values(),
    *PRACTICE,
    know_people.__file__,
    quizzes.__file__,
    __file__,
)
NUM_OWN = 60
# What a person's notes are filled up with, and to how many.
FOLDERS = (("alone", 20), ("alone", 60), ("generated", 200), ("generated", 1000), ("public", 200), ("public", 1000))
# Of `Hit.strength`; see MIN_STRENGTH.
THRESHOLDS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--public", type=Path, help="folder of Markdown notes to fill up with")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    public = read_texts(Folder(options.public, include=("*.md",))).documents if options.public else []
    files = {use: [know_people.person(seed, NUM_OWN, file) for seed in options.seeds] for use, file in KINDS.items()}
    files["practice"] = [practised(file) for file in PRACTICE]
    rows = []
    for use, people in files.items():
        for row in measured(people, use, public):
            rows.append(row)
            print(row, flush=True)
    if options.record:
        evidence.record("search", SOURCES, rows, options.record, on_cpu=True)


def measured(people: list[Person], use: str, public: list[Document]) -> Iterator[dict]:
    """Yields a row for each person of a file and each folder."""
    for person in people:
        others = [asked for other in people if other is not person for asked in other.quiz]
        for fill, size in FOLDERS:
            documents = [as_document(note) for note in person.notes[:size]]
            if fill == "generated":
                documents = filled(documents, generated(person, use), size)
            elif fill == "public":
                documents = filled(documents, random.Random(person.name).sample(public, len(public)), size)
            if fill != "public" or public:
                yield {"use": use, "person": person.name, "fill": fill, **measure(documents, person, others)}


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
        "wrongly_refused": refused(found, MIN_STRENGTH),
        "unanswerable": len(without),
        "rightly_refused": refused(without, MIN_STRENGTH),
        **{f"wrongly_at_{at}": refused(found, at) for at in THRESHOLDS},
        **{f"rightly_at_{at}": refused(without, at) for at in THRESHOLDS},
        "index_seconds": round(seconds, 3),
        "search_ms": round(search_ms, 2),
    }


def refused(found: list[list[Hit]], threshold: float) -> float:
    return round(sum(not hits or hits[0].strength < threshold for hits in found) / len(found), 4)


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


def generated(person: Person, use: str) -> Iterator[Document]:
    """Yields notes about subjects of other files; what is for testing is only among the notes of people for testing."""
    draw = random.Random(person.name)
    written = {name: know_people._written(file) for name, file in KINDS.items() if name != "test" or use == "test"}
    everyone = [(kind, people, words) for people, kinds, words in written.values() for kind in kinds]
    others = [kind for name, (_, kinds, _) in written.items() if name != use for kind in kinds]
    subjects = sorted({each for kind in others for each in kind["subjects"]})
    while True:
        kind, people, words = draw.choice(everyone)
        constants = people[draw.choice(kind["who"])]["constants"]
        try:
            note, _ = know_people._note(kind, draw.choice(subjects), know_people._Values(draw, constants, words))
        except IndexError:
            continue  # the kind has more values than its list
        yield as_document(note)


def practised(file: Path) -> Person:
    """A person with the practice notes of one setting, two facts of each of which are asked in one wording."""
    draw = random.Random(file.stem)
    notes = draw.sample(tomllib.loads(file.read_text(encoding="utf-8"))["note"], k=30)
    quiz = (
        Question(f"{note['name']}.md", draw.choice(fact["ask"]), (fact["answer"],))
        for note in notes
        for fact in draw.sample(note["facts"], k=2)
    )
    return Person(file.stem, tuple(Note(f"{note['name']}.md", note["text"]) for note in notes), tuple(quiz))


if __name__ == "__main__":
    main()
