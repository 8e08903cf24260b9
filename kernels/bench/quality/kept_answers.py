"""Measures how many of the base model's right answers an adapter of the recipe `notes` keeps, and what it gains.

    python kernels/bench/quality/kept_answers.py [FOLDER...] [--people 1 ...] [--model tiny] [--arms now mlp ...]
                                                 [--notes 56] [--seeds 0] [--questions N] [--device cpu]
                                                 [--record [FILE]]

A case is --notes notes of an invented person (know_people.py) or of a folder (one author), and a seed; of 56, one split
trains on as many as the last training of 40 notes does. In each case, every arm trains an adapter from the start, which
is judged, perhaps scaled down too: the gain on the test documents, and replies to questions. No question is trained on.
Rows are recorded as they come, and some questions that only the base model answers right are printed.

known   questions of the quiz (general_texts.general_questions); general replies that an arm trains on are of such kinds
other   questions of other kinds (other_questions.txt)
read    questions about an invented person's notes, below the passage with the answer

Each is the number of right answers, *kept* those of them that the base model gives too, *share* the first beside its.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality import know_people, quizzes, reading
from quality.notes_quality import notes
from sebp_edge import Recipe
from sebp_edge.ask import general_texts, make_quiz
from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.wording import end_ids, prompt_for, shown
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import FASTEST
from sebp_edge.engine.models import lora
from sebp_edge.engine.models.adaptation import restore
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.generation import answer_all
from sebp_edge.engine.models.loading import BaseModel, load_base_model
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.engine.training.gate import Gate
from sebp_edge.engine.training.probing import probe
from sebp_edge.engine.training.run import Task, TrainingRun
from sebp_edge.engine.training.teacher import with_teacher
from sebp_edge.events import silent
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.machine.devices import pick_device, without_cudnn_attention
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.replies import reply_to
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.documents import Document
from sebp_edge.values.example import Example

OTHER = Path(__file__).with_name("other_questions.txt")
SOURCES = (
    *evidence.OPS,
    "sebp_edge",
    "sebp_edge/engine/models/tiny/model.safetensors",
    "recipes/notes.toml",
    *(general_texts.FOLDER / name for name in ("questions.txt", "chat.txt", "texts.txt")),
    OTHER,
    know_people.TEST,
    know_people.__file__,
    quizzes.__file__,
    reading.__file__,
    __file__,
)
RECIPE = Recipe.load("notes").replace(refit=False)
LOST = 8  # how many of the questions that are not answered any more are printed
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Arm:
    """What keeps what the model could.

    Attributes:
        replies: tokens of the base model's replies to general questions, at most 80, for each token of the notes.
        text: tokens of general text for each token of the notes.
        mlp_only: whether only MLPs are adapted, with as many parameters.
        scales: at which the adapter is judged.
    """

    replies: float = 0
    text: float = 0.0
    mlp_only: bool = False
    scales: tuple[float, ...] = (1.0,)


ARMS = {
    "now": Arm(scales=(1.0, 0.7, 0.5)),
    "capped": Arm(replies=0.15, text=0.15),
    "replies": Arm(replies=1),
    "both": Arm(replies=1, text=0.1),
    "mlp": Arm(mlp_only=True),
    "text": Arm(text=0.1),
}


class Question(NamedTuple):
    """A question of a kind with its right answers, and its prompt."""

    kind: str
    question: str
    answers: tuple[str, ...]
    prompt: list[int]


class Reply(NamedTuple):
    """A reply to a question."""

    text: str
    is_right: bool


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--people", type=int, nargs="*", default=[], help="not 0, who is asked about")
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--notes", type=int, default=56)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--questions", type=int, help="the first of each kind only")
    parser.add_argument("--kinds", nargs="+", default=["known", "other", "read"])
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    device, rows = pick_device(options.device), []
    for model in options.model:
        base = load_base_model(resolve(model), RECIPE, device)
        asked = [each for each in questions(base.tokenizer, options.questions) if each.kind in options.kinds]
        began = perf_counter()
        by_base = ask(base, asked)
        about = {"model": Path(model).name, "texts": "", "seed": 0, "arm": "base", "scale": 0.0}
        seconds = {"all_seconds": perf_counter() - began}
        rows.append(evidence.show(about | answered(asked, by_base, by_base) | seconds))
        for seed, arm, source in product(options.seeds, options.arms, [*options.people, *options.folders]):
            texts = texts_of(source, options.notes, seed)
            about |= {"texts": f"person {source}" if source in options.people else source.name}
            about |= {"seed": seed, "arm": arm}
            for row in measure(base, texts, seed, ARMS[arm], asked, by_base):
                rows.append(evidence.show(about | row))
            evidence.record("kept-answers", SOURCES, rows, options.record, device.type == "cpu")


def texts_of(source: int | Path, number: int, seed: int) -> list:
    """Returns notes of an invented person, or the files of some notes in a folder."""
    if isinstance(source, Path):
        return notes(source, number, seed)
    return [note.text for note in know_people.person(source, number).notes]


def measure(
    base: BaseModel,
    texts: Sequence[str | Path],
    seed: int,
    arm: Arm,
    asked: Sequence[Question],
    by_base: Sequence[Reply],
) -> Iterator[dict]:
    """Trains an adapter; yields what it gains and keeps at each scale."""
    began = perf_counter()
    dataset = make_dataset(read_texts(texts), base.tokenizer, RECIPE, None, Drawing(seed))
    dataset = replace(dataset, general=general(base, arm, dataset, seed))
    recipe = RECIPE.for_size(base.model.num_parameters())
    recipe = recipe.replace(r=lora_rank(base, arm), general=(arm.replies + arm.text) / 2)
    recipe = recipe.replace(lora_alpha=2 * recipe.r, load_in_4bit=False)
    task = Task(dataset, make_schedules(dataset, recipe, seed), recipe, seed, FASTEST)
    with MemoryGuard(base.device) as guard, adapting(arm), without_cudnn_attention():
        run = TrainingRun(base, task, guard, silent, perf_counter)
        gate = Gate(recipe.margin, dataset.draw.cluster_of, True)
        try:
            run.train(gate)
            progress, test = run.progress[0], task.schedules[0].test.examples
            trained = {
                "rate": recipe.peak_rate,
                "steps": len(progress.losses),
                "training_seconds": progress.seconds,
                "all_seconds": perf_counter() - began,
            }
            for scale in arm.scales:
                restore(run.adaptation, progress.best_state)
                for name, parameter in run.adaptation.model.named_parameters():
                    if parameter.requires_grad and "lora_B" in name:
                        parameter.data.mul_(scale)
                after = progress.after if scale == 1 else run.score(run.adaptation, test)
                gain = gate.judge(progress.before, after).gain
                row = {"scale": scale, "gain": gain.gain, "at_least": gain.lower}
                replies = ask(base, asked)
                yield row | answered(asked, replies, by_base) | probed(base, run) | trained
                show_lost(asked, replies, by_base)
        finally:
            run.detach()


def general(base: BaseModel, arm: Arm, dataset: Dataset, seed: int) -> list[Example]:
    """Returns the examples of an arm that keep what the base model could."""
    length, tokenizer = dataset.context_length, base.tokenizer
    found = general_texts.general_examples(tokenizer, length, round(arm.text * dataset.num_tokens), seed)
    if arm.replies:
        asked = general_texts.chat_questions(round(arm.replies * dataset.num_tokens))
        replies = reply_to(base, general_texts.CHAT_TOKENS, lambda: None, asked)
        found += general_texts.chat_examples(asked, replies, tokenizer, length)
    collator = Collator(length, base.pad_token_id)
    return with_teacher(base.model, found, collator, base.device, silent)


def lora_rank(base: BaseModel, arm: Arm) -> int:
    """Returns the rank with which an arm's adapter has about as many parameters as the recipe's."""
    rank = RECIPE.with_defaults().r
    sizes = {name: sum(layer.weight.shape) for name, layer in linear_layers(base)}
    of_mlps = sum(size for name, size in sizes.items() if name.endswith(MLP))
    return round(rank * sum(sizes.values()) / of_mlps) if arm.mlp_only else rank


def linear_layers(base: BaseModel):
    head = base.model.get_output_embeddings()
    for name, layer in base.model.named_modules():
        if name.endswith("_proj") and layer is not head:
            yield name, layer


@contextmanager
def adapting(arm: Arm) -> Iterator[None]:
    """Context in which new adapters are beside the modules of an arm."""
    config = lora._config
    if arm.mlp_only:
        lora._config = partial(config, target_modules=list(MLP))
    try:
        yield
    finally:
        lora._config = config


def questions(tokenizer, number: int | None) -> list[Question]:
    """Returns the first questions of each kind."""
    notes_of, about_notes = reading.of_person(0)
    documents = {name: Document(name, text, name) for name, text in notes_of.items()}
    kinds = {
        "known": [(*each, None) for each in general_texts.general_questions()],
        "other": [(*read_question(line), None) for line in OTHER.read_text(encoding="utf-8").splitlines()],
        "read": [
            (each.question, each.answers, shown(reading.right_passages(passages_of(documents[each.document]), each)))
            for each in about_notes
        ],
    }
    return [
        Question(kind, question, answers, list(prompt_for(question, tokenizer, passage).input_ids))
        for kind, found in kinds.items()
        for question, answers, passage in found[:number]
    ]


def read_question(line: str) -> tuple[str, tuple[str, ...]]:
    question, answers = line.split("|")
    return question, tuple(answers.split("/"))


def ask(base: BaseModel, asked: Sequence[Question]) -> list[Reply]:
    """Asks the model in its present state."""
    prompts, ends = [each.prompt for each in asked], end_ids(base.tokenizer)
    texts = answer_all(base.model, base.tokenizer, prompts, ends, make_quiz.REPLY_TOKENS)
    return [Reply(text, quizzes.is_right(text, each.answers)) for text, each in zip(texts, asked, strict=True)]


def answered(asked: Sequence[Question], replies: Sequence[Reply], by_base: Sequence[Reply]) -> dict[str, float]:
    """By kind: the right answers, those of them that the base model gives too, and their number as a share of its."""
    row, kinds = {}, dict.fromkeys(each.kind for each in asked)
    for kind in kinds:
        places = [place for place, each in enumerate(asked) if each.kind == kind]
        right, before = ({place for place in places if found[place].is_right} for found in (replies, by_base))
        row |= {
            kind: len(right),
            f"{kind}_kept": len(right & before),
            f"{kind}_share": len(right) / max(1, len(before)),
        }
    return row


def show_lost(asked: Sequence[Question], replies: Sequence[Reply], by_base: Sequence[Reply]) -> None:
    """Prints some questions that only the base model answers right."""
    found = zip(asked, replies, by_base, strict=True)
    lost = [(each, reply, before) for each, reply, before in found if before.is_right and not reply.is_right]
    for each, reply, before in lost[:: max(1, len(lost) // LOST)][:LOST]:
        print(f"  {each.question[-80:]!r} {before.text!r} -> {reply.text!r}", flush=True)


def probed(base: BaseModel, run: TrainingRun) -> dict[str, float]:
    """What the product's probes show: by how much the loss on general text rose, and facts known of those before."""
    length = getattr(base.model.config, "max_position_embeddings", None)
    found = probe(base, run.adaptation, general_texts.encode_probes(base.tokenizer, length), silent)
    facts = found.facts
    return {"general_rise": found.general_loss_after / found.general_loss_before - 1} | (
        {"facts_before": facts.before, "facts_after": facts.after} if facts else {}
    )


if __name__ == "__main__":
    main()
