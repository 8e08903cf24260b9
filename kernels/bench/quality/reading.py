"""Measures how well a model answers from notes that a search finds: the base model and a reader.

    python kernels/bench/quality/reading.py [--model FOLDER...] [--arms base reader] [--people 0 1 2] [--seeds 0]
                                [--device cpu] [--processes 7] [--record [FILE]]

The notes and questions are those of invented people who are for testing only (know_people.py): 60 notes and 120
questions each. A reader is trained with the recipe `ask` and never sees them. A row is a model asked about one person's
notes; shares are of right replies.

found      below the passage that the search finds
keywords   the same, asked in keywords
right      below the passage with an answer
alone      without a passage
general    the quiz's general questions
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from quality import know_people, quizzes
from quality.quizzes import Question
from sebp_edge import AdapterStore, Personalizer
from sebp_edge.ask import general_texts, make_quiz, practice
from sebp_edge.ask.answer import NUM_PASSAGES
from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.terms import is_small
from sebp_edge.ask.wording import end_ids, prompt_for, shown
from sebp_edge.engine.models.generation import answer_all
from sebp_edge.machine.devices import pick_device
from sebp_edge.values.documents import Document

SOURCES = (
    *evidence.OPS,
    "sebp_edge",
    "recipes/ask.toml",
    *practice.PRACTICE.glob("*.toml"),
    *practice.QUIZ.glob("*.toml"),
    general_texts.FOLDER / "questions.txt",
    know_people.TEST,
    know_people.__file__,
    quizzes.__file__,
    __file__,
)
ARMS = ("base", "reader")
READER = "ask"
NUM_NOTES = 60


@dataclass(frozen=True)
class Job:
    """A reader, or the base model, that is asked about the notes of some people."""

    model: str
    arm: str
    seed: int
    people: tuple[int, ...]
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1, help="adapters that are trained at once")
    options = parser.parse_args(arguments)
    people = tuple(options.people)
    jobs = [
        Job(model, arm, seed, people, options.device)
        for model in options.model
        for seed in options.seeds
        for arm in options.arms
        if arm != "base" or seed == options.seeds[0]
    ]
    rows = []
    on_cpu = pick_device(options.device).type == "cpu"
    for found in side_by_side.run(measure, jobs, options.processes):
        for row in found:
            rows.append(evidence.show(row | {"at_once": options.processes}))
        rows.sort(key=lambda row: [str(row[column]) for column in ("model", "arm", "seed", "person")])
        evidence.record("reading-cpu" if on_cpu else "reading-gpu", SOURCES, rows, options.record, on_cpu)


def measure(job: Job) -> list[dict]:
    """The figures of one adapter, a row for each person."""
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            job.model, recipe=READER, seed=job.seed, device=job.device, store=AdapterStore(store)
        )
        trained = {}
        if job.arm == "reader":
            result = personalizer.adapt(activate_anyway=True)
            trained = {
                "verdict": result.verdict,
                "examples": result.examples,
                "tokens": result.tokens,
                "seconds": round(result.seconds, 1),
                "training_seconds": result.cost.training_seconds,
            }
            trained |= {f"quiz_{name}": value for name, value in vars(result.quiz).items()} if result.quiz else {}
        replies = Replies(personalizer)
        row = {"model": Path(job.model).name, "arm": job.arm, "seed": job.seed}
        return [row | {"person": person} | ask_about(person, replies) | trained for person in job.people]


class Replies:
    """The likeliest replies of the model in use."""

    def __init__(self, personalizer: Personalizer):
        self._personalizer = personalizer
        self._base = personalizer.in_use.load(personalizer.on_event)

    def to(self, questions: list[str], passages: list[str | None]) -> list[str]:
        tokenizer = self._base.tokenizer
        pairs = zip(questions, passages, strict=True)
        return self.to_prompts(
            [list(prompt_for(question, tokenizer, passage).input_ids) for question, passage in pairs]
        )

    def to_prompts(self, prompts: list[list[int]]) -> list[str]:
        tokenizer = self._base.tokenizer
        with self._personalizer.in_use.generating(with_adapter=True):
            return answer_all(self._base.model, tokenizer, prompts, end_ids(tokenizer), make_quiz.REPLY_TOKENS)


@cache
def of_person(person: int) -> tuple[dict[str, str], tuple[Question, ...]]:
    """A person's notes by file, and the questions about them."""
    made = know_people.person(person, NUM_NOTES)
    return {note.file: note.text.strip() for note in made.notes}, made.quiz


def ask_about(person: int, replies: Replies) -> dict[str, float]:
    notes, asked = of_person(person)
    documents = {name: Document(name, text, name) for name, text in notes.items()}
    index, questions = Index(documents.values()), [each.question for each in asked]
    hits = [index.search(question, NUM_PASSAGES) for question in questions]
    passages = [shown(hit.passage for hit in each) for each in hits]
    right = [shown(right_passages(passages_of(documents[each.document]), each)) for each in asked]
    general = list(general_texts.general_questions())
    of_world = replies.to([question for question, _ in general], [None] * len(general))
    return {
        "questions": len(asked),
        "search": share(
            any(quizzes.stands_in(a, shown(h.passage for h in hit)) for a in each.answers)
            for hit, each in zip(hits, asked, strict=True)
        ),
        "found": right_share(replies.to(questions, passages), asked),
        "keywords": right_share(replies.to([*map(in_keywords, questions)], passages), asked),
        "right": right_share(replies.to(questions, right), asked),
        "alone": right_share(replies.to(questions, [None] * len(asked)), asked),
        "general": share(
            quizzes.is_right(reply, answers) for reply, (_, answers) in zip(of_world, general, strict=True)
        ),
    }


def in_keywords(question: str) -> str:
    """A question without its small words and its question mark, as people search."""
    return " ".join(word for word in question.rstrip("?").split() if not is_small(word.casefold()))


def right_passages(passages, asked: Question):
    """The first passage with an accepted answer, else the first one."""
    with_answer = [each for each in passages if any(quizzes.stands_in(a, each.text) for a in asked.answers)]
    return (with_answer or passages)[:1]


def right_share(replies: list[str], asked) -> float:
    return share(quizzes.is_right(reply, each.answers) for reply, each in zip(replies, asked, strict=True))


def share(found) -> float:
    found = list(found)
    return sum(found) / max(1, len(found))


if __name__ == "__main__":
    main()
