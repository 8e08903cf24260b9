"""Measures how sure a reader is of its replies, and how many are right from which probability on.

    python kernels/bench/quality/certainty.py --model FOLDER... --authors FOLDER [--device cpu] [--record [FILE]]

A reader is trained with the recipe `ask`. It reads the passage that the search finds for each question of the invented
people (know_people.py), for questions about another person's notes, and for those of outside.py, with and without an
answer. A row is a reply below a passage that is strong enough: whether it stands in the passage, its probability, and
whether it is right.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import outside, quizzes, reading
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.ask.answer import NUM_PASSAGES, is_found
from sebp_edge.ask.index import Hit, Index
from sebp_edge.ask.make_quiz import REPLY_TOKENS
from sebp_edge.ask.standing import stands_in
from sebp_edge.ask.wording import end_ids, prompt_for, shown
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.machine.devices import pick_device
from sebp_edge.values.documents import Document

SOURCES = (*reading.SOURCES, *outside.QUESTIONS.glob("*.toml"), outside.__file__, __file__)
# Questions about each other person's notes, which a person's notes do not answer.
NUM_FOREIGN = 60


class Question(NamedTuple):
    """A question, what was found for it, and whether a reply to it is right."""

    about: str
    is_answerable: bool
    text: str
    hits: list[Hit]
    is_right: Callable[[str], bool]


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--authors", type=Path, required=True, help="folder with the notes of fetch_authors.py")
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    asked, rows = [*of_people(), *from_outside(options.authors)], []
    for model in options.model:
        rows += read(model, asked, options.device)
        evidence.record("certainty", SOURCES, rows, options.record, pick_device(options.device).type == "cpu")


def of_people() -> Iterator[Question]:
    for person in range(3):
        notes, quiz = reading.of_person(person)
        index = Index(Document(name, text, name) for name, text in notes.items())
        for each in quiz:
            hits = index.search(each.question, NUM_PASSAGES)
            yield Question("people", True, each.question, hits, partial(quizzes.is_right, answers=each.answers))
        for each in reading.of_person(person + 1)[1][:NUM_FOREIGN]:
            if each.document not in notes:
                hits = index.search(each.question, NUM_PASSAGES)
                yield Question("other people", False, each.question, hits, partial(quizzes.is_right, answers=()))


def from_outside(authors: Path) -> Iterator[Question]:
    for name in outside.NAMES:
        for kept in (False, True):
            collection = outside.collection(authors, name, kept=kept)
            index = Index(collection.documents)
            for each in collection.asked:
                hits = index.search(each.question, NUM_PASSAGES)
                about, is_right = f"{name}{', kept' * kept}", partial(is_accepted, each.accepted)
                yield Question(about, bool(each.right), each.question, hits, is_right)


def is_accepted(accepted: re.Pattern | None, said: str) -> bool:
    return bool(accepted and accepted.search(said))


def read(model: str, asked: list[Question], device: str | None, recipe: str | Recipe = reading.READER) -> list[dict]:
    """Returns a row for each question."""
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(model, recipe=recipe, device=device, store=AdapterStore(store))
        personalizer.adapt(activate_anyway=True)
        base, rows = personalizer.in_use.load(personalizer.on_event), []
        sampling, tokenizer = Sampling(REPLY_TOKENS, temperature=0, stop=("\n",)), base.tokenizer
        with personalizer.in_use.generating(with_adapter=True) as (decoder, _):
            for about, is_answerable, question, hits, is_right in asked:
                row = {"model": Path(model).name, "about": about, "answerable": is_answerable, "found": is_found(hits)}
                if row["found"]:
                    passage = shown(hit.passage for hit in hits)
                    ids = prompt_for(question, tokenizer, passage).input_ids
                    said = generate_text(base.model, tokenizer, ids, end_ids(tokenizer), sampling, decoder=decoder)
                    row["probability"] = round(said.probability, 4)
                    row |= {"stands": stands_in(said.text, question, passage), "right": is_right(said.text)}
                rows.append(row)
        return rows


if __name__ == "__main__":
    main()
