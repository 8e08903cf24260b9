"""Measures what settings of the recipe `ask` make of a model: what it answers and still knows, and what the gate says.

    python kernels/bench/quality/reader_settings.py [--model PATH...] [--settings 7e-4:1:80:0.1 ...] [--people 0 1 2]
                                                    [--seeds 0] [--device cpu] [--file CSV] [--record [FILE]]

A setting is RATE:EPOCHS:STEPS:GENERAL, with the least steps of an epoch and the share of general text. A row is written
to --file as soon as it is measured, the base model's first. Shares are of right replies below the passage that the
search finds, about the people of reading.py. The quiz's own notes are counted apart from the practice notes of the test
split, with what was gained and lost there.
"""

import csv
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import reading
from quality.reading import of_person, right_share
from sebp_edge import Personalizer, Recipe
from sebp_edge.ask.answer import NUM_PASSAGES
from sebp_edge.ask.general_texts import general_questions
from sebp_edge.ask.index import Index
from sebp_edge.ask.make_quiz import make_quiz
from sebp_edge.ask.practice import practice_reading
from sebp_edge.ask.wording import shown
from sebp_edge.events import Event, Notice, StepDone
from sebp_edge.machine.devices import pick_device
from sebp_edge.values.answers import is_right
from sebp_edge.values.documents import Document

OWN = Recipe.load("ask")
# The most telling first.
SETTINGS = (
    "7e-4:1:80:0.1",
    "4e-4:2:80:0.1",
    "2e-4:1:80:0.1",
    "7e-4:1:80:0.3",
    "4e-4:1:80:0.1",
    "2e-4:3:80:0.1",
    "4e-4:1:160:0.1",
    "4e-4:2:80:0.3",
)
COLUMNS = (
    *("model", "setting", "seed", "found", "found_0", "found_1", "found_2", "general", "general_before", "verdict"),
    *("quiz", "quiz_before", "questions", "own", "own_before", "own_gained", "own_lost", "own_questions"),
    *("chosen", "validation", "scaled", "general_loss", "steps", "training_seconds", "seconds"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    parser.add_argument("--file", type=Path, help="to which rows are added as they come")
    options = parser.parse_args(arguments)
    rows = []
    for model in options.model:
        with tempfile.TemporaryDirectory() as store:
            study = Study(model, options.people, options.device, store)
            for seed, setting in [(None, None), *product(options.seeds, options.settings)]:
                row = study.trained(setting, seed) if setting else study.base()
                rows.append(evidence.show({name: row[name] for name in COLUMNS if row.get(name) is not None}))
                if options.file:
                    append(options.file, row)
    sources = (*reading.SOURCES, __file__)
    evidence.record("reader-settings", sources, rows, options.record, pick_device(options.device).type == "cpu")


def append(file: Path, row: dict) -> None:
    """Adds a row to a CSV file, whole or not at all, and the names of the columns if the file is new."""
    is_new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def recipe_of(setting: str) -> Recipe:
    """The recipe "ask" with the values of a setting."""
    rate, epochs, steps, general = setting.split(":")
    return OWN.replace(learning_rate=float(rate), epochs=int(epochs), min_steps=int(steps), general=float(general))


class Study:
    """One model, which stays loaded, and what it is asked."""

    def __init__(self, model: str, people: list[int], device: str | None, store: str):
        self._events: list[Event] = []
        self._personalizer = Personalizer(model, recipe=OWN, device=device, store=store, on_event=self._events.append)
        self._model, self._replies = Path(model).name, reading.Replies(self._personalizer)
        self._people = {person: _asked(person) for person in people}
        tokenizer = self._personalizer.in_use.load(self._events.append).tokenizer
        quiz = make_quiz(practice_reading().documents, (), tokenizer, OWN.context_length)
        self._own = {each.question: each for each in quiz.about_notes}
        self._right_before: dict[str, bool] = {}

    def base(self) -> dict:
        """The figures of the model without an adapter, which is asked the quiz's own questions too."""
        begin = time.monotonic()
        replies = self._replies.to_prompts([list(each.found) for each in self._own.values()])
        self._right_before = {
            asked.question: is_right(reply, asked.answers)
            for reply, asked in zip(replies, self._own.values(), strict=True)
        }
        general = list(general_questions())
        known = self._replies.to([question for question, _ in general], [None] * len(general))
        return self._row("base", None) | {
            "own_before": sum(self._right_before.values()),
            "own_questions": len(self._own),
            "general": sum(is_right(reply, answers) for reply, (_, answers) in zip(known, general, strict=True)),
            "seconds": round(time.monotonic() - begin, 1),
        }

    def trained(self, setting: str, seed: int) -> dict:
        """The figures of a reader of this setting; the base model was asked before."""
        begin = time.monotonic()
        self._events.clear()
        self._personalizer.recipe, self._personalizer.seed = recipe_of(setting), seed
        result = self._personalizer.adapt(name=f"{setting} {seed}".translate(NAMED), activate_anyway=True)
        quiz, curve = result.quiz, result.curves[0]
        own = [(self._right_before[each.question], each.right) for each in result.answers if each.question in self._own]
        return self._row(setting, seed) | {
            "general": quiz.general_after,
            "general_before": quiz.general_before,
            "verdict": result.verdict,
            "quiz": quiz.right_after,
            "quiz_before": quiz.right_before,
            "questions": quiz.questions,
            "own": sum(after for _, after in own),
            "own_before": sum(before for before, _ in own),
            "own_gained": sum(after and not before for before, after in own),
            "own_lost": sum(before and not after for before, after in own),
            "own_questions": len(own),
            "chosen": result.record.recipe["learning_rate"],
            "validation": min(curve.validation, default=None),
            "scaled": " ".join(
                word
                for event in self._events
                if isinstance(event, Notice) and "was scaled to" in event.message
                for word in event.message.split()
                if word.isdigit()
            ),
            "general_loss": round(result.general_loss_after / result.general_loss_before - 1, 4),
            "steps": sum(isinstance(event, StepDone) for event in self._events),
            "training_seconds": result.cost.training_seconds,
            "seconds": round(time.monotonic() - begin, 1),
        }

    def _row(self, setting: str, seed: int | None) -> dict:
        found = {
            f"found_{person}": right_share(self._replies.to([each.question for each in asked], passages), asked)
            for person, (asked, passages) in self._people.items()
        }
        mean = sum(found.values()) / len(found)
        return {"model": self._model, "setting": setting, "seed": seed, "found": mean} | found


# What names of adapters must not have.
NAMED = str.maketrans(":,. ", "----")


def _asked(person: int):
    """A person's questions, and the passage that the search finds for each."""
    notes, asked = of_person(person)
    index = Index(Document(name, text, name) for name, text in notes.items())
    hits = [index.search(each.question, NUM_PASSAGES) for each in asked]
    return asked, [shown(hit.passage for hit in each) for each in hits]


if __name__ == "__main__":
    main()
