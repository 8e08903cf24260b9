"""Measures what a model adapted to notes knows about them: a quiz before and after, closed-book and with the note.

    python kernels/bench/know_quality.py [--model FOLDER ...] [--people 0 1 2] [--notes 60] [--seeds 0] [--examples]
                                         [--arms "raw notes" know] [--device cpu] [--record [FILE]]

The notes are those of invented people (know_people.py), or with --examples those of examples/notes, with the questions
of example_questions.toml. "Closed" is the share of right replies to the question alone, "with note" to the question
below its note. "Own" is the adaptation's own quiz. The seed sets the quiz, the shuffling and the initial weights.

The arms: "sentences" has no questions in keywords, "questions" no general text, "own model" also the model's own
questions, and "distillation" the base model with the note in its prompt as the teacher of the answers.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import evidence
import know_people
import quizzes
from know_distillation import distilled
from quizzes import Question
from sebp_edge import AdapterStore, AdaptResult, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.answering import answer_all
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
    know_people.KINDS,
    know_people.__file__,
    quizzes.__file__,
    Path(__file__).with_name("know_distillation.py"),
    __file__,
)
# A recipe, and how an arm differs from it; see also `as_in`.
ARMS: dict[str, tuple[str, dict]] = {
    "raw notes": ("notes", {"epochs": 10}),
    "sentences": ("know", {}),
    "questions": ("know", {"general": 0.0}),
    "know": ("know", {}),
    "own model": ("know", {"questions": "rules and model"}),
    "distillation": ("know", {}),
}
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--notes", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--examples", action="store_true", help="the notes of examples/notes instead of people's")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    records = []
    print(f"{'model':>12}{'person':>14}{'arm':>12}{'seed':>6}", *(f"{name:>15}" for name in COLUMNS), "verdict")
    for model in options.model:
        with cases(options.people, options.notes, examples=options.examples) as found:
            for case in found:
                for record in measure(model, case, options.arms, options.seeds, options.device):
                    figures = (f"{record[column]:>15{form}}" for column, form in COLUMNS.items())
                    start = f"{record['model'][:11]:>12}{case.name:>14}{record['arm']:>12}{record['seed']:>6}"
                    print(start, *figures, record["verdict"], flush=True)
                    records.append(record)
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        evidence.record(f"know-quality-{'cpu' if on_cpu else 'gpu'}", SOURCES, records, options.record, on_cpu)


@contextmanager
def cases(people: list[int], notes: int, *, examples: bool) -> Iterator[list[Case]]:
    """The notes of examples/notes, or those of invented people in temporary folders."""
    if examples:
        yield [Case("examples", EXAMPLES, tuple(quizzes.read(EXAMPLE_QUESTIONS)))]
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [_written(know_people.person(seed, notes), Path(folder) / str(seed)) for seed in people]


def measure(model: str, case: Case, arms: list[str], seeds: list[int], device: str | None) -> Iterator[dict]:
    """Yields the figures of each arm and seed; the base model is asked once."""
    base_closed, base_with_note = case.ask(Personalizer(model, device=device))
    for arm in arms:
        recipe, changes = ARMS[arm]
        recipe = Recipe.load(recipe).replace(**changes)
        for seed in seeds:
            with tempfile.TemporaryDirectory() as store, as_in(arm, case):
                personalizer = Personalizer(model, recipe=recipe, device=device, seed=seed, store=AdapterStore(store))
                result = personalizer.adapt(case.folder, keep_anyway=True)
                closed, with_note = case.ask(personalizer)
            yield {
                "model": Path(model).name,
                "person": case.name,
                "arm": arm,
                "seed": seed,
                "facts": len(case.questions),
                "base_closed": base_closed,
                "closed": closed,
                "base_with_note": base_with_note,
                "with_note": with_note,
                **cost(result),
            }


def as_in(arm: str, case: Case) -> AbstractContextManager:
    """Context in which the product does what only this arm does."""
    if arm == "sentences":
        return patch("sebp_edge.questions.examples.ask_by_cues", lambda text, name: [])
    return distilled(case.folder) if arm == "distillation" else nullcontext()


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


def _written(person: know_people.Person, folder: Path) -> Case:
    folder.mkdir()
    person.write(folder)
    return Case(person.name, folder, person.quiz)


if __name__ == "__main__":
    main()
