"""Measures how often `ask` finds the note that answers a question, and how often it says rightly that there is none.

    python kernels/bench/quality/search.py [--people 0 1 2] [--public FOLDER] [--record [FILE]]

The questions are those of invented people who are for testing only (know_people.py); the thresholds were chosen with
those of know_kinds_tuning.toml and know_kinds_varied.toml. Each person's 60 notes are searched alone, among 1,000 that
the same generator fills up with other subjects, and with --public among 1,000 filled up with the Markdown files of a
folder. A question is answered by its note if the passage found has an accepted answer. Questions without an answer are
those of the other people. The index is made of texts that were read before.
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import know_people, quizzes
from quality.know_people import Note, Person
from quality.quizzes import Question
from sebp_edge.ask.answer import is_found
from sebp_edge.ask.index import Index
from sebp_edge.texts.documents import Document
from sebp_edge.texts.folders import Folder
from sebp_edge.texts.readers import read_texts

SOURCES = (
    "sebp_edge/ask",
    "sebp_edge/texts",
    *know_people.KINDS.values(),
    know_people.__file__,
    quizzes.__file__,
    __file__,
)
NUM_NOTES, NUM_FILLED = 60, 1000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--public", type=Path, help="folder of Markdown notes to fill up with")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    people = [know_people.person(seed, NUM_NOTES, know_people.TEST) for seed in options.people]
    public = read_texts(Folder(options.public, include=("*.md",))).documents if options.public else []
    rows = []
    for person in people:
        own = [as_document(note) for note in person.notes]
        others = [asked for other in people if other is not person for asked in other.quiz]
        fills = {"alone": own, "generated": filled(own, generated(person))}
        if public:
            fills["public"] = filled(own, random.Random(person.name).sample(public, len(public)))
        for fill, documents in fills.items():
            rows.append({"person": person.name, "fill": fill, **measure(documents, person, others)})
            print(rows[-1], flush=True)
    if options.record:
        evidence.record("search", SOURCES, rows, options.record, on_cpu=True)


def measure(documents: list[Document], person: Person, others: list[Question]) -> dict:
    """The shares of questions, and what the index takes."""
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    index = Index(documents)
    seconds = time.process_time() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    begin = time.process_time()
    found = [index.search(asked.question) for asked in person.quiz]
    search_ms = 1000 * (time.process_time() - begin) / len(found)
    right = [[answers(hit, asked) for hit in hits] for hits, asked in zip(found, person.quiz, strict=True)]
    names = {document.source for document in documents}
    without = [asked for asked in others if asked.document not in names]
    return {
        "notes": len(documents),
        "passages": len(index),
        "questions": len(found),
        "first": sum(hits[:1] == [True] for hits in right) / len(right),
        "among_five": sum(map(any, right)) / len(right),
        "wrongly_refused": sum(not is_found(hits) for hits in found) / len(found),
        "unanswerable": len(without),
        "rightly_refused": sum(not is_found(index.search(asked.question)) for asked in without) / len(without),
        "index_seconds": round(seconds, 3),
        "index_mb": round(memory / 1024, 1),
        "search_ms": round(search_ms, 2),
    }


def answers(hit, asked: Question) -> bool:
    """Whether a passage is of the right note and has an accepted answer."""
    text = hit.passage.text
    return hit.passage.document == asked.document and any(quizzes.stands_in(each, text) for each in asked.answers)


def as_document(note: Note) -> Document:
    return Document(note.file, note.text.strip(), note.file)


def filled(own: list[Document], others) -> list[Document]:
    """The notes, filled up with others of other names."""
    found = {document.source: document for document in own}
    for document in others:
        if len(found) == NUM_FILLED:
            break
        found.setdefault(document.source, document)
    return list(found.values())


def generated(person: Person):
    """Yields notes of all kinds about subjects that no person for testing has."""
    draw = random.Random(person.name)
    written = [know_people._written(file) for file in know_people.KINDS.values()]
    everyone = [(kind, people, words) for people, kinds, words in written for kind in kinds]
    tests = {id(kind) for kind in know_people._written(know_people.TEST)[1]}
    subjects = sorted({each for kind, *_ in everyone if id(kind) not in tests for each in kind["subjects"]})
    while True:
        kind, people, words = draw.choice(everyone)
        constants = people[draw.choice(kind["who"])]["constants"]
        try:
            note, _ = know_people._note(kind, draw.choice(subjects), know_people._Values(draw, constants, words))
        except IndexError:
            continue  # the kind has more values than its list
        yield as_document(note)


if __name__ == "__main__":
    main()
