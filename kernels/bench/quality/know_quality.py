"""Measures what a model adapted to notes knows about them: a quiz before and after, closed-book and with the note.

    python kernels/bench/quality/know_quality.py [--model FOLDER] [--people 0 1 2] [--notes 60] [--examples] [--seeds 0]
                                         [--device cpu] [--processes 14] [--minutes 8]
                                         [--record [FILE]]

The notes are those of invented people who are for testing only (know_people.py), and with --examples those of
examples/notes, with the questions of example_questions.toml. "Closed" is the share of right replies to the question
alone, "with note" to the question below its note. "Own" is the adaptation's own quiz. The seed sets the quiz, the
shuffling and the initial weights. Times count only with one process.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))


import evidence
import side_by_side
from quality import know_people, quizzes
from quality.quizzes import Question
from sebp_edge import AdapterStore, AdaptResult, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.generation import answer_all
from sebp_edge.questions import practice
from sebp_edge.texts.prompts import encode_prompt

EXAMPLES = evidence.ROOT / "examples" / "notes"
EXAMPLE_QUESTIONS = Path(__file__).with_name("example_questions.toml")
SOURCES = (
    *evidence.OPS,
    "sebp_edge",
    "recipes/notes.toml",
    "recipes/know.toml",
    "examples/notes",
    EXAMPLE_QUESTIONS,
    *practice.FOLDER.glob("*.toml"),
    know_people.TUNING,
    know_people.TEST,
    know_people.__file__,
    quizzes.__file__,
    __file__,
)
MAX_NEW_TOKENS = 24
COLUMNS = {
    "base_closed": ".1%",
    "closed": ".1%",
    "base_with_note": ".1%",
    "with_note": ".1%",
    "general_rise": ".1%",
    "examples": "d",
    "seconds": ".1f",
}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Case:
    """A folder of notes and the questions about them."""

    name: str
    folder: Path
    questions: tuple[Question, ...]

    def ask(self, personalizer: Personalizer) -> tuple[float, float]:
        """The shares of right replies: closed-book, and with the note in the prompt."""
        prompts = [asked.question for asked in self.questions]
        with_note = [f"{self._note(asked)}\n\n{asked.question}" for asked in self.questions]
        return self._share(personalizer, prompts), self._share(personalizer, with_note)

    def _share(self, personalizer: Personalizer, prompts: list[str]) -> float:
        replies = ask_all(personalizer, [[{"role": "user", "content": prompt}] for prompt in prompts])
        right = [quizzes.is_right(reply, asked.answers) for reply, asked in zip(replies, self.questions, strict=True)]
        return sum(right) / len(right)

    def _note(self, asked: Question) -> str:
        return (self.folder / asked.document).read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Notes:
    """The notes of an invented person, or of examples/notes.

    Attributes:
        person: the person's seed; None for examples/notes.
        number: of the person's notes.
        kinds_file: see `know_people.person`.
    """

    person: int | None
    number: int = 60
    kinds_file: Path = know_people.TEST

    @contextmanager
    def written(self) -> Iterator[Case]:
        """Context with the notes in a folder, and the questions about them."""
        if self.person is None:
            yield Case("examples", EXAMPLES, tuple(quizzes.read(EXAMPLE_QUESTIONS)))
            return
        person = know_people.person(self.person, self.number, self.kinds_file)
        with tempfile.TemporaryDirectory() as folder:
            person.write(Path(folder))
            yield Case(person.name, Path(folder), person.quiz)


@dataclass(frozen=True)
class Job:
    """One adaptation, and the questions before and after it."""

    model: str
    notes: Notes
    seed: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--people", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--notes", type=int, default=60)
    parser.add_argument("--examples", action="store_true", help="the notes of examples/notes, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    notes = [Notes(person, options.notes) for person in options.people] + [Notes(None)] * options.examples
    jobs = [Job(options.model, each, seed, options.device) for seed in options.seeds for each in notes]
    print(f"{'person':>12}{'seed':>6}", *(f"{name:>15}" for name in COLUMNS), "verdict")
    rows, device = [], pick_device(options.device).type
    # Runs at once are another result than those whose times count.
    result = f"know-quality-{'cpu' if device == 'cpu' else 'gpu'}"
    result += "-together" * (options.processes > 1)
    for row in side_by_side.run(measure, jobs, options.processes, options.minutes):
        figures = (f"{row[column]:>15{form}}" for column, form in COLUMNS.items())
        print(f"{row['person']:>12}{row['seed']:>6}", *figures, row["verdict"], flush=True)
        rows.append(row | {"at_once": options.processes})
        rows.sort(key=lambda row: [row[column] for column in ("person", "seed")])
        if options.record:
            evidence.record(result, SOURCES, rows, options.record, device == "cpu")


def measure(job: Job) -> dict:
    """The figures of one adaptation."""
    base_closed, base_with_note = ask_base(job.model, job.notes, job.device)
    with job.notes.written() as case, tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            job.model,
            recipe=Recipe.load("know"),
            device=job.device,
            seed=job.seed,
            store=AdapterStore(store),
        )
        result = personalizer.adapt(case.folder, activate_anyway=True)
        closed, with_note = case.ask(personalizer)
    return {
        "model": Path(job.model).name,
        "person": case.name,
        "seed": job.seed,
        "facts": len(case.questions),
        "base_closed": base_closed,
        "closed": closed,
        "base_with_note": base_with_note,
        "with_note": with_note,
        **cost(result),
    }


@cache
def ask_base(model: str, notes: Notes, device: str | None) -> tuple[float, float]:
    """The base model's shares of right replies."""
    with notes.written() as case:
        return case.ask(Personalizer(model, device=device))


def cost(result: AdaptResult) -> dict:
    """What the adaptation was and what it cost."""
    return {
        "notes": result.documents,
        "examples": result.examples,
        "verdict": result.verdict,
        "trained_on_all": result.trained_on_all,
        "general_before": result.general_loss_before,
        "general_after": result.general_loss_after,
        "general_rise": result.general_loss_after / result.general_loss_before - 1,
        "seconds": round(result.seconds, 1),
        "own_questions": result.quiz.questions if result.quiz else None,
        "own_right": result.quiz.right_after if result.quiz else None,
    }


def ask_all(personalizer: Personalizer, prompts: list[Messages]) -> list[str]:
    """The replies to the prompts, each the most likely tokens."""
    base = personalizer.in_use.load(personalizer.on_event)
    encoded = [encode_prompt(prompt, base.tokenizer, chat=True) for prompt in prompts]
    tokens = [list(each.input_ids) for each in encoded]
    with personalizer.in_use.generating(with_adapter=True):
        return answer_all(base.model, base.tokenizer, tokens, encoded[0].end_ids, MAX_NEW_TOKENS)


if __name__ == "__main__":
    main()
