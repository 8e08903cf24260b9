"""Compares adapters that read: what a model answers about notes that a search finds for it.

    python kernels/bench/quality/ask.py --model FILE --out rows.jsonl [--arms base practice ...] [--seeds 0 1 2]
                                        [--people 0 1 2] [--processes 8] [--minutes 8] [--device cpu] [--tiny]

The notes and questions are those of invented people who are for testing only (know_people.py). Each row of the file is
an adapter asked about one person's notes, with one character for each question: 1 right, 0 wrong, - not asked. A row
that is in the file already is not measured again.

closed         the question alone
right          below the passage that the answer stands in
found1,3,5     below the best passages that the search finds
absent         below the best three of all other notes: 1 if the reply is that it is not there
cut            below the best three, without the sentence that the answer stands in: likewise
refused        found3, if the reply is that it is not there
foreign        found3, of another person's notes
general        general_questions.txt, which have nothing to do with notes
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))

import side_by_side
from quality import know_people, quizzes
from sebp_edge import Recipe
from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import Passage, passages_of
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.catalog import resolve
from sebp_edge.models.generation import end_ids_of
from sebp_edge.models.loading import load_base_model
from sebp_edge.models.lora import LoraAdapter
from sebp_edge.questions import rules
from sebp_edge.questions.cues import ask_by_cues
from sebp_edge.questions.general_texts import general_examples
from sebp_edge.questions.notes import read_note
from sebp_edge.questions.practice import practice_notes
from sebp_edge.questions.question import Question, distinct
from sebp_edge.questions.sentences import facts_of_sentences
from sebp_edge.questions.structures import facts_of_structures
from sebp_edge.questions.wordings import worded
from sebp_edge.texts.documents import Conversation, Document
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.prompts import encode_prompt

ABSENT = "Not in your notes."
INSTRUCTION = f"Answer from these notes in a few words. If they do not say it, answer: {ABSENT}\n\n"
GENERAL, CHAT = (Path(__file__).with_name(f"general_{name}.txt") for name in ("questions", "chat"))
CONTEXT = 1536
MAX_NEW_TOKENS = 24
CHAT_TOKENS = 48
BATCH = 32
# Examples of a step that are computed at once.
MICRO_BATCH = 4


# ------------------------------------------------------------------------------------------------------------- search


class Search:
    """The product's search, also without one of the documents."""

    def __init__(self, notes: dict[str, str]):
        self._documents = [Document(name, text, name) for name, text in notes.items()]
        self._index = Index(self._documents)

    def find(self, question: str, number: int, without: str = "") -> list[Passage]:
        found = [hit.passage for hit in self._index.search(question, number + 8)]
        return [each for each in found if each.document != without][:number]

    def of(self, name: str) -> list[Passage]:
        return [passage for each in self._documents if each.source == name for passage in passages_of(each)]


# ----------------------------------------------------------------------------------------------------------- examples


@dataclass(frozen=True)
class Source:
    """A note with questions about it."""

    name: str
    text: str
    questions: tuple[Question, ...]


def prompt(passages: Sequence[Passage], question: str) -> str:
    return "\n\n".join([*(f"{each.place}\n{each.text}" for each in passages), question])


def by_rules(text: str, name: str, facts_of: Sequence[Callable]) -> list[Question]:
    """The questions of some rules, as `rules.ask` makes them of all."""
    note = read_note(text, name)
    spaced = rules._spaced(note.text)
    facts = [fact for find in facts_of for fact in find(note) if rules._is_good(fact, spaced)]
    facts = sorted(rules._unambiguous(facts), key=lambda fact: -fact.rank)[: rules.MAX_FACTS]
    return distinct([rules._checked(worded(fact)) for fact in facts])


KINDS = {
    "c": lambda text, name: ask_by_cues(text, name),
    "s": lambda text, name: by_rules(text, name, [facts_of_structures]),
    "t": lambda text, name: by_rules(text, name, [facts_of_sentences]),
}


def own_sources(notes: dict[str, str], kinds: str) -> list[Source]:
    made = [
        Source(name, text, tuple(question for kind in kinds for question in KINDS[kind](text, name)))
        for name, text in notes.items()
    ]
    return [each for each in made if each.questions]


@cache
def practice_sources() -> list[Source]:
    return [Source(each.name, each.text, (*each.questions, *each.in_keywords())) for each in practice_notes()]


def drawn_examples(sources: list[Source], number: int, draw: random.Random, absent: bool = True) -> list[list[tuple[str, str]]]:
    """Conversations about passages as the search finds them: several questions, some of them without an answer."""
    search = Search({each.name: each.text for each in sources})
    order: list[Source] = []
    while len(order) < number:
        order += draw.sample(sources, len(sources))
    return [turns for source in order[:number] if (turns := _conversation(source, sources, search, draw, absent))]


def _conversation(source: Source, sources: list[Source], search: Search, draw: random.Random, absent: bool = True) -> list[tuple[str, str]]:
    asked = draw.sample(source.questions, min(len(source.questions), draw.choice((1, 2, 3))))
    first = draw.choice(asked[0].wordings)
    number = draw.choice((1, 2, 3, 3, 4, 5))
    found = search.find(first, number)
    kind = draw.random() if absent else 1.0
    if kind < 0.15:  # the note is not found
        shown = [each for each in search.find(first, number + 3, without=source.name)][:number]
        pairs = [(first, ABSENT)]
    else:
        shown = found if any(each.document == source.name for each in found) else []
        if not shown:
            shown = [*found[: number - 1], draw.choice(search.of(source.name))]
        pairs = []
        for question in asked:
            wording = draw.choice(question.wordings) if pairs else first
            inside = any(
                quizzes.stands_in(question.answer, each.text) for each in shown if each.document == source.name
            )
            pairs.append((wording, question.answer if inside else ABSENT))
        if kind < 0.30:  # the note is found, but does not say it
            shown, is_cut = without_answer(shown, source.name, asked[0].answer)
            if is_cut:
                pairs = [(first, ABSENT)]
        elif kind < 0.5:  # another question is about something else
            other = draw.choice(sources)
            if other.name not in {each.document for each in shown}:
                pairs.insert(
                    draw.randrange(len(pairs) + 1), (draw.choice(draw.choice(other.questions).wordings), ABSENT)
                )
    if not absent:
        pairs = [pair for pair in pairs if pair[1] != ABSENT]
        if not pairs:
            return []
    draw.shuffle(shown)
    (question, answer), *others = pairs
    return [(prompt(shown, question), answer), *others]


def without_answer(passages: list[Passage], document: str, answer: str) -> tuple[list[Passage], bool]:
    """The passages without the lines or sentences of a document that hold the answer; whether that was possible."""
    kept, is_cut = [], False
    for each in passages:
        if each.document == document and quizzes.stands_in(answer, each.text):
            # Each part with the space after it, so that what is left looks as before.
            parts = re.findall(r".+?(?:(?<=[.!?])\s+|\n+|$)", each.text, re.DOTALL)
            text = "".join(part for part in parts if not quizzes.stands_in(answer, part)).strip()
            if not text or quizzes.stands_in(answer, text):
                return passages, False
            each, is_cut = replace(each, text=text), True
        kept.append(each)
    return kept, is_cut


# ----------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Arm:
    """What an adapter trains on.

    Attributes:
        practice: whether on practice notes.
        own: on which kinds of question about the owner's notes: cues, structures, texts' sentences.
        keeps: what the base model teaches: general text, chat.
        is_voice: on the notes as text only.
        instructs: whether an instruction stands before the passages.
    """

    practice: bool = False
    own: str = ""
    keeps: tuple[str, ...] = ("text", "chat")
    is_voice: bool = False
    instructs: bool = False
    absent: bool = True
    examples: int = 300
    learning_rate: float = 5e-4
    r: int = 16
    epochs: int = 3


ARMS = {
    "base": Arm(),
    "voice": Arm(is_voice=True, keeps=()),
    "practice": Arm(practice=True),
    "practice A0": Arm(practice=True, absent=False),
    "practice A0 1200": Arm(practice=True, absent=False),
    "practice A0 1200 lr1e-3": Arm(practice=True, absent=False, examples=1200, learning_rate=1e-3),
    "practice A0 1200 r64": Arm(practice=True, absent=False, examples=1200, r=64),
    "practice A0 1200 none": Arm(practice=True, absent=False, examples=1200, keeps=()),
    "own cst A0": Arm(own="cst", absent=False),
    "own cs A0": Arm(own="cs", absent=False),
    "both cst A0": Arm(practice=True, own="cst", absent=False),
    "both cs A0": Arm(practice=True, own="cs", absent=False),
}
STEP_EXAMPLES = 16


def encoded(conversations: list[list[tuple[str, str]]], tokenizer) -> list[Example]:
    documents = [
        Document(
            "",
            Conversation(
                tuple(
                    {"role": role, "content": text}
                    for turn in turns
                    for role, text in zip(("user", "assistant"), turn, strict=True)
                )
            ),
        )
        for turns in conversations
    ]
    examples, _ = encode(documents, tokenizer, CONTEXT, chat_template=True)
    whole = {}
    for each in examples:
        whole.setdefault(each.document, []).append(each)
    return [found[0] for found in whole.values() if len(found) == 1]


def batch_of(examples: list[Example], device) -> tuple[torch.Tensor, ...]:
    longest = max(len(each.input_ids) for each in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, each in enumerate(examples):
        size = len(each.input_ids)
        ids[row, :size], mask[row, :size] = torch.tensor(each.input_ids), 1
        labels[row, : size - 1] = torch.tensor(each.labels[1:])  # shifted
    return ids.to(device), labels.to(device), mask.to(device)


def logits_of(base, ids, labels, mask) -> torch.Tensor:
    """The logits of the loss rows, fp32 [C, V]."""
    hidden = base.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return base.model.lm_head(hidden[labels != -100]).float()


def train(base, arm: Arm, notes: dict[str, str], kept: dict[str, list[Example]], seed: int) -> LoraAdapter:
    """A trained adapter."""
    recipe = Recipe.load("notes").replace(r=arm.r, lora_alpha=2 * arm.r, learning_rate=arm.learning_rate)
    adapter = LoraAdapter.fresh(base, recipe, seed)
    epochs = list(epochs_of(arm, notes, base.tokenizer, seed))
    parameters = [each for each in adapter.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=arm.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(seed)
    steps = [draw_step for epoch in epochs for draw_step in in_steps(epoch, draw)]
    for number, examples in enumerate(steps):
        share = min((number + 1) / max(1, len(steps) // 10), 1) * (1 - number / len(steps))
        for group in optimizer.param_groups:
            group["lr"] = arm.learning_rate * share
        num_tokens = sum(each.num_loss_tokens for each in examples)
        for begin in range(0, len(examples), MICRO_BATCH):
            ids, labels, mask = batch_of(examples[begin : begin + MICRO_BATCH], base.device)
            with autocast(base.device):
                logits = logits_of(base, ids, labels, mask)
            (F.cross_entropy(logits, labels[labels != -100], reduction="sum") / num_tokens).backward()
        for name in arm.keeps:
            general = batch_of(draw.sample(kept[name], min(4, len(kept[name]))), base.device)
            with torch.no_grad(), adapter.disabled(), autocast(base.device):
                teacher = logits_of(base, *general).log_softmax(dim=1)
            with autocast(base.device):
                student = logits_of(base, *general).log_softmax(dim=1)
            F.kl_div(student, teacher, reduction="batchmean", log_target=True).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return adapter


def autocast(device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def in_steps(examples: list[Example], draw: random.Random) -> Iterator[list[Example]]:
    examples = draw.sample(examples, len(examples))
    for begin in range(0, len(examples), STEP_EXAMPLES):
        yield examples[begin : begin + STEP_EXAMPLES]


def epochs_of(arm: Arm, notes: dict[str, str], tokenizer, seed: int) -> Iterator[list[Example]]:
    own = own_sources(notes, arm.own) if arm.own else []
    for epoch in range(arm.epochs):
        draw = random.Random(f"{seed} {epoch}")
        if arm.is_voice:
            yield encode([Document("", text) for text in notes.values()], tokenizer, CONTEXT)[0]
            continue
        kinds = [practice_sources()] * arm.practice + [own] * bool(own)
        made = [turns for each in kinds for turns in drawn_examples(each, arm.examples // len(kinds), draw, arm.absent)]
        if arm.instructs:
            made = [[(INSTRUCTION + question, answer), *others] for (question, answer), *others in made]
        yield encoded(made, tokenizer)


def kept_examples(base) -> dict[str, list[Example]]:
    """General text, and chat in which the base model replies."""
    text = [each for each in general_examples(base.tokenizer, CONTEXT, 40_000, 0)]
    questions = CHAT.read_text(encoding="utf-8").splitlines()
    replies, _ = reply_to(base, questions, CHAT_TOKENS)
    return {"text": text, "chat": encoded([[pair] for pair in zip(questions, replies, strict=True)], base.tokenizer)}


# ------------------------------------------------------------------------------------------------------------- asking


@torch.no_grad()
def reply_to(base, prompts: list[str], max_new_tokens: int = MAX_NEW_TOKENS) -> tuple[list[str], list[float]]:
    """The likeliest replies, and how probable it is that each begins as ABSENT does."""
    tokenizer, model = base.tokenizer, base.model
    encoded_prompts = [encode_prompt([{"role": "user", "content": each}], tokenizer, chat=True) for each in prompts]
    ends = sorted({*encoded_prompts[0].end_ids, *end_ids_of(model)})
    first = tokenizer(ABSENT, add_special_tokens=False)["input_ids"][0]
    order = sorted(range(len(prompts)), key=lambda number: len(encoded_prompts[number].input_ids))
    replies, absent = [""] * len(prompts), [0.0] * len(prompts)
    for begin in range(0, len(order), BATCH):
        numbers = order[begin : begin + BATCH]
        rows = [list(encoded_prompts[number].input_ids) for number in numbers]
        longest = max(map(len, rows))
        ids = torch.tensor([[ends[0]] * (longest - len(row)) + row for row in rows], device=base.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=base.device)
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        begins = made.logits[0].float().softmax(dim=1)[:, first].tolist()
        for number, row, share in zip(numbers, made.sequences[:, longest:].tolist(), begins, strict=True):
            cut = next((at for at, token in enumerate(row) if token in ends), len(row))
            replies[number] = tokenizer.decode(row[:cut], skip_special_tokens=True).strip()
            absent[number] = round(share, 4)
    return replies, absent


@dataclass(frozen=True)
class Case:
    """A person's notes, and the questions about them."""

    notes: dict[str, str]
    quiz: tuple[quizzes.Question, ...]

    @classmethod
    @cache
    def of(cls, person: int, number: int) -> "Case":
        made = know_people.person(person, 60, know_people.TEST)
        return cls({each.file: each.text for each in made.notes}, made.quiz[:number])


def is_absent(reply: str) -> bool:
    return reply.lower().startswith("not in your notes")


def figures(base, person: int, people: list[int], number: int, *, instructs: bool) -> dict:
    """All figures of the adapter that is in use, about one person's notes."""
    case, search = Case.of(person, number), Search(Case.of(person, number).notes)
    found5 = [search.find(each.question, 5) for each in case.quiz]
    right = [right_passage(search, each) for each in case.quiz]
    absent = [search.find(each.question, 3, without=each.document) for each in case.quiz]
    cut = [cut_passages(found[:3], each) for found, each in zip(found5, case.quiz, strict=True)]
    other = Case.of(people[(people.index(person) + 1) % len(people)], number)
    elsewhere = Search(other.notes)
    general = [line.split("|") for line in GENERAL.read_text(encoding="utf-8").splitlines()][: 2 * number]
    asks = [each.question for each in case.quiz]
    groups = {
        "closed": asks,
        "right": list(map(prompt, right, asks)),
        **{f"found{n}": [prompt(found[:n], ask) for found, ask in zip(found5, asks, strict=True)] for n in (1, 3, 5)},
        "absent": list(map(prompt, absent, asks)),
        "cut": [prompt(shown, ask) for shown, ask in zip(cut, asks, strict=True) if shown],
        "foreign": [prompt(elsewhere.find(each.question, 3), each.question) for each in other.quiz],
        "general": [question for question, _ in general],
    }
    asked = [
        INSTRUCTION * (instructs and name not in ("closed", "general")) + each
        for name, group in groups.items()
        for each in group
    ]
    replies, shares = reply_to(base, asked)
    of, share_of, begin = {}, {}, 0
    for name, group in groups.items():
        of[name], share_of[name] = replies[begin : begin + len(group)], shares[begin : begin + len(group)]
        begin += len(group)
    bits = {name: score(of[name], case.quiz) for name in ("closed", "right", "found1", "found3", "found5")}
    bits["foreign"] = score(of["foreign"], other.quiz)
    answers = [Question_(answer.split("/")) for _, answer in general]
    bits["general"] = score(of["general"], answers)
    bits["absent"] = "".join(str(int(is_absent(reply))) for reply in of["absent"])
    cut_replies = iter(of["cut"])
    bits["cut"] = "".join(str(int(is_absent(next(cut_replies)))) if shown else "-" for shown in cut)
    bits["refused"] = "".join(str(int(is_absent(reply))) for reply in of["found3"])
    bits["general_absent"] = "".join(str(int(is_absent(reply))) for reply in of["general"])
    bits["stands"] = "".join(
        str(int(any(stands(reply, each.text) for each in found[:3])))
        for reply, found in zip(of["found3"], found5, strict=True)
    )
    searched = {
        f"search{n}": "".join(
            str(int(any(p.document == each.document for p in found[:n])))
            for found, each in zip(found5, case.quiz, strict=True)
        )
        for n in (1, 3, 5)
    }
    probabilities = {f"p_{name}": share_of[name] for name in ("found3", "absent", "cut")}
    return bits | searched | probabilities | {"sample": of["found3"][:12], "general_sample": of["general"][:12]}


@dataclass(frozen=True)
class Question_:
    answers: list[str]


def stands(reply: str, text: str) -> bool:
    sentence = quizzes.first_sentence(reply)
    return bool(quizzes.normalised(sentence)) and quizzes.stands_in(sentence, text)


def score(replies: list[str], quiz) -> str:
    return "".join(
        str(int(not is_absent(reply) and quizzes.is_right(reply, each.answers)))
        for reply, each in zip(replies, quiz, strict=True)
    )


def right_passage(search: Search, asked: quizzes.Question) -> list[Passage]:
    own = search.of(asked.document)
    holding = [each for each in own if any(quizzes.stands_in(answer, each.text) for answer in asked.answers)]
    return (holding or own)[:1]


def cut_passages(found: list[Passage], asked: quizzes.Question) -> list[Passage]:
    """The passages without the answer; none if it does not stand there, or cannot be cut out."""
    shown, is_cut = found, False
    for answer in asked.answers:
        shown, done = without_answer(shown, asked.document, answer)
        is_cut |= done
    text = "\n".join(each.text for each in shown)
    return shown if is_cut and not any(quizzes.stands_in(answer, text) for answer in asked.answers) else []


# --------------------------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """One adapter, asked about some people's notes."""

    model: str
    arm: str
    seed: int
    people: tuple[int, ...]
    all_people: tuple[int, ...]
    number: int
    device: str | None
    examples: int | None


@cache
def loaded(model: str, device: str | None):
    torch.set_float32_matmul_precision("high")
    base = load_base_model(resolve(model), Recipe.load("notes"), pick_device(device))
    base.model.float().requires_grad_(False)
    object.__setattr__(base, "dtype", torch.float32)
    return base, kept_examples(base)


def measure(job: Job) -> list[dict]:
    base, kept = loaded(job.model, job.device)
    arm = ARMS[job.arm]
    if job.examples:
        arm = Arm(**{**arm.__dict__, "examples": job.examples, "epochs": 1})
    adapter = None
    if arm.practice or arm.own or arm.is_voice:
        adapter = train(base, arm, Case.of(job.people[0], job.number).notes, kept, job.seed)
        adapter.model.merge_adapter()
    rows = []
    torch.cuda.empty_cache()
    for person in job.people:
        made = figures(base, person, list(job.all_people), job.number, instructs=arm.instructs)
        rows.append({"arm": job.arm, "seed": job.seed, "person": person} | made)
    if adapter is not None:
        adapter.model.unmerge_adapter()
        adapter.detach()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--number", type=int, default=120, help="questions about each person's notes")
    parser.add_argument("--examples", type=int, help="trains on so few, once")
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    options = parser.parse_args()
    done = set()
    if options.out.exists():
        rows = map(json.loads, options.out.read_text().splitlines())
        done = {(row["arm"], row["seed"], row["person"]) for row in rows}
    jobs, people = [], tuple(options.people)
    for seed in options.seeds:
        for name in options.arms:
            arm = ARMS[name]
            is_base = name.startswith("base")
            if is_base and seed != options.seeds[0]:
                continue
            of_person = arm.own or arm.is_voice or is_base
            for group in [(person,) for person in people] if of_person else [people]:
                if not all((name, seed, person) in done for person in group):
                    jobs.append(
                        Job(options.model, name, seed, group, people, options.number, options.device, options.examples)
                    )
    for rows in side_by_side.run(measure, jobs, options.processes, options.minutes):
        with options.out.open("a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                shares = {name: share(row[name]) for name in row if isinstance(row[name], str) and name != "arm"}
                print(
                    f"{row['arm']:>16} {row['seed']} {row['person']}",
                    *(f"{n} {s:.0%}" for n, s in shares.items()),
                    flush=True,
                )


def share(bits: str) -> float:
    asked = bits.replace("-", "")
    return asked.count("1") / max(1, len(asked))


if __name__ == "__main__":
    main()
