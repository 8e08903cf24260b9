"""Measures how well a model answers from notes that a search finds: the base model, a voice adapter, and a reader.

    python kernels/bench/quality/reading.py [--model FOLDER...] [--arms base voice reader] [--people 0 1 2] [--seeds 0]
                                [--authors FOLDER] [--device cpu] [--processes 7] [--record [FILE]]

The notes and questions are those of invented people who are for testing only (know_people.py): 60 notes and 120
questions each. A reader is trained with the recipe `ask` and never sees them; a voice adapter is trained on them with
the recipe `notes`. A row is an adapter asked about one person's notes; shares are of right replies.

found      below the passage that the search finds
keywords   the same, asked in keywords
right      below the passage with an answer
alone      without a passage
answered   what `ask` says: the reply, the sentence that it quotes instead, or that it is not there
unanswerable   questions about another person's notes that `ask` refuses
general    the quiz's general questions

With --authors, the folder of fetch_authors.py, there is also a row for each collection of outside.py, which a voice
adapter is not asked about: of its questions, which are told a right or a wrong reply, shown a sentence that holds the
answer or not, and refused; of those without an answer, which are told a reply, and which are refused.
"""

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from quality import know_people, outside, quizzes
from quality.quizzes import Question
from sebp_edge import AdapterStore, Personalizer
from sebp_edge.ask import general_texts, make_quiz, practice
from sebp_edge.ask.answer import NUM_PASSAGES, checked, is_found, quoted
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
    "recipes/notes.toml",
    "recipes/ask.toml",
    *practice.PRACTICE.glob("*.toml"),
    *practice.QUIZ.glob("*.toml"),
    general_texts.FOLDER / "questions.txt",
    know_people.TEST,
    know_people.__file__,
    quizzes.__file__,
    *outside.QUESTIONS.glob("*.toml"),
    outside.__file__,
    __file__,
)
RECIPES = {"base": None, "voice": "notes", "reader": "ask"}
NUM_NOTES = 60
OUTCOMES = (
    *("told_right", "told_wrong", "shown_right", "shown_wrong", "refused"),
    *("unanswerable_told_wrong", "unanswerable_shown_wrong", "unanswerable_refused"),
)


@dataclass(frozen=True)
class Job:
    """One adapter, or the base model, that is asked about the notes of some people."""

    model: str
    arm: str
    seed: int
    people: tuple[int, ...]
    device: str | None
    authors: Path | None = None


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--arms", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--authors", type=Path, help="folder with the public notes of fetch_authors.py")
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1, help="adapters that are trained at once")
    options = parser.parse_args(arguments)
    people = tuple(options.people)
    jobs = [
        Job(model, arm, seed, group, options.device, None if arm == "voice" else options.authors)
        for model in options.model
        for seed in options.seeds
        for arm in options.arms
        for group in ([(person,) for person in people] if arm == "voice" else [people])
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
        recipe = RECIPES[job.arm]
        personalizer = Personalizer(
            job.model, recipe=recipe or "notes", seed=job.seed, device=job.device, store=AdapterStore(store)
        )
        trained = {}
        if recipe is not None:
            texts = [*of_person(job.people[0])[0].values()] if job.arm == "voice" else None
            result = personalizer.adapt(texts, activate_anyway=True)
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
        found = [row | {"person": person} | ask_about(person, replies) | trained for person in job.people]
        for name, kept in product(outside.NAMES if job.authors else (), (False, True)):
            collection = outside.collection(job.authors, name, kept=kept)
            about = {"person": f"{name}{', kept' * kept}"}
            found.append(row | about | ask_from_outside(collection, replies) | trained)
        return found


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
    found = replies.to(questions, passages)
    answers = [answer_of(*each) for each in zip(questions, hits, found, strict=True)]
    right = [shown(right_passages(passages_of(documents[each.document]), each)) for each in asked]
    foreign = [each.question for each in of_person(person + 1)[1] if each.document not in notes]
    general = list(general_texts.general_questions())
    of_world = replies.to([question for question, _ in general], [None] * len(general))
    return {
        "questions": len(asked),
        "search": share(
            any(quizzes.stands_in(a, shown(h.passage for h in hit)) for a in each.answers)
            for hit, each in zip(hits, asked, strict=True)
        ),
        "found": right_share(found, asked),
        "keywords": right_share(replies.to([*map(in_keywords, questions)], passages), asked),
        "right": right_share(replies.to(questions, right), asked),
        "alone": right_share(replies.to(questions, [None] * len(asked)), asked),
        "answered": right_share(answers, asked),
        "refused": share(not is_found(each) for each in hits),
        "unanswerable": share(not is_found(index.search(question, NUM_PASSAGES)) for question in foreign),
        "general": share(
            quizzes.is_right(reply, answers) for reply, (_, answers) in zip(of_world, general, strict=True)
        ),
    }


def ask_from_outside(collection: outside.Collection, replies: Replies) -> dict[str, int]:
    """How many of a collection's questions get which kind of answer."""
    index, questions = Index(collection.documents), [each.question for each in collection.asked]
    hits = [index.search(question, NUM_PASSAGES) for question in questions]
    found = replies.to(questions, [shown(hit.passage for hit in each) for each in hits])
    kinds = Counter()
    for asked, hit, reply in zip(collection.asked, hits, found, strict=True):
        answer = quoted(asked.question, hit, NUM_PASSAGES)
        if not answer.is_final:
            answer = checked(reply.partition("\n")[0], asked.question, answer.sources)
        is_right = bool(asked.accepted and asked.accepted.search(answer.text))
        kind = (
            "refused" if not answer.found else f"{'shown' if answer.quoted else 'told'}_{'right' * is_right or 'wrong'}"
        )
        kinds[kind if asked.right else f"unanswerable_{kind}"] += 1
    return {"questions": sum(bool(asked.right) for asked in collection.asked)} | {
        kind: kinds[kind] for kind in OUTCOMES
    }


def in_keywords(question: str) -> str:
    """A question without its small words and its question mark, as people search."""
    return " ".join(word for word in question.rstrip("?").split() if not is_small(word.casefold()))


def answer_of(question: str, hits, reply: str) -> str:
    """What `ask` says; nothing if it refuses."""
    if not is_found(hits):
        return ""
    return checked(reply.partition("\n")[0], question, tuple(hit.passage for hit in hits)).text


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
