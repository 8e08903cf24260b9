"""Inspects texts before a training: what is read, how it is split, what it costs, and what to expect.

It shows examples as the model gets them. These contain the user's text: they are for the screen, never for logs,
metadata or the store.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median

from sebp_edge.basics.labels import IGNORE
from sebp_edge.basics.units import duration, gigabytes, plural
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.models.hub_cache import has_own_tokenizer
from sebp_edge.errors import MachineError, ModelError, TextsError
from sebp_edge.lessons.conversations import is_of_people
from sebp_edge.run.conditions import Conditions
from sebp_edge.run.expectations import expectation, mostly_of_people, what_the_kind_can_do
from sebp_edge.run.fitting_recipe import fitting_recipe
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.values.chats import Author
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.documents import Content, Document, LeftOut
from sebp_edge.values.example import Example
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import FOLD_ROLES, SPLITS, TRAIN

NUM_EXAMPLES = 2
# A document is read badly if it takes this many times as many tokens per character as the median of the documents, and
# at least the second number; shorter documents than the third, in characters, are not compared.
BADLY_READ, MIN_TOKENS_PER_CHARACTER, MIN_CHARACTERS = 2.0, 0.5, 200
# Of Obsidian's templates and its plugin Templater, and of Excalidraw, wherever they are.
_TEMPLATE = re.compile(r"<%[-_*~]?\s*tp\.|\{\{\s*(?:title|date|time|value|name)\b[^{}\n]{0,80}\}\}", re.IGNORECASE)
_DRAWING = re.compile(r"^excalidraw-plugin:|^```compressed-json|\"type\":\s*\"excalidraw\"", re.MULTILINE)
# How many characters of a document are searched for these.
_SEARCHED = 100_000
# Stands for what other people wrote.
OTHERS_WORDS = "[what others wrote]"


@dataclass(frozen=True)
class Piece:
    """A run of an example's text; `trained` says whether its tokens have loss.

    What other people wrote is not shown: the text says so instead.
    """

    text: str
    trained: bool


@dataclass(frozen=True)
class RenderedExample:
    """An example in words, special tokens included.

    Attributes:
        tokens, trained_tokens: the number of its tokens, and of those with loss.
    """

    document: str
    tokens: int
    trained_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Reason:
    """A reason why something is left out, and its sources; with counts if only so much of each is, the most first."""

    reason: str
    sources: tuple[str, ...]
    counts: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A part of the split: "train", "validation", "test", or "fold 1" and so on, which is tested once."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class BadlyRead:
    """A document for which the tokenizer needs many tokens."""

    document: str
    tokens_per_character: float


@dataclass(frozen=True)
class Inspection:
    """What an adaptation to some texts would do.

    Attributes:
        model, recipe: the names of the model and the recipe.
        documents, examples, tokens, characters: how many of each would be used.
        left_out: what would be left out, by reason; the most frequent reason first.
        copies: how many documents are left out since they equal others.
        near_duplicates: sources of documents that are near-duplicates of each other, a group each.
        boilerplate_share: the share of tokens in lines that stand in many documents.
        templates, drawings: sources of documents that would be read, but look like a template or a drawing.
        tokens_per_character: the median over the documents.
        badly_read: documents that take far more, the worst first.
        own_tokenizer: whether the model's own tokenizer was used; else the bundled model's.
        split: the parts of the split.
        concerns: why the gate would judge nothing, a sentence each: there are too few documents, or a gain on these
            texts would be meaningless.
        beginning: what `adapt` would learn on from, why it would learn all again, or that nothing is new; empty if no
            version is active.
        refusal: why `adapt` would refuse these texts; empty if it would not.
        plan: the predicted memory and time; None if `adapt` would refuse, or if nothing is new.
        expectations: what this model will and will not be able to do with these texts, a sentence or two each.
        fitting_recipe: the bundled recipe that fits these texts.
        exports: what chats and mails were found, such as "a WhatsApp chat with 3 people, 12,345 messages".
        own_words, others_words: the words of the owner that are trained on, in chats and mails, and those of others,
            which are context.
        authors: who wrote in them; for the screen only, so neither `repr` nor `to_dict` has them.
        rendered: two examples with the trained part marked; they contain the user's text, so `repr` leaves them out.
    """

    model: str
    recipe: str
    documents: int
    examples: int
    tokens: int
    characters: int
    left_out: tuple[Reason, ...]
    copies: int
    near_duplicates: tuple[tuple[str, ...], ...]
    boilerplate_share: float
    templates: tuple[str, ...]
    drawings: tuple[str, ...]
    tokens_per_character: float
    badly_read: tuple[BadlyRead, ...]
    own_tokenizer: bool
    split: tuple[Part, ...]
    concerns: tuple[str, ...]
    beginning: str
    refusal: str
    plan: Plan | None
    expectations: tuple[str, ...]
    fitting_recipe: str
    exports: tuple[str, ...]
    own_words: int
    others_words: int
    authors: tuple[Author, ...] = field(repr=False)
    rendered: tuple[RenderedExample, ...] = field(repr=False)

    @classmethod
    def of(cls, preparation: Preparation, conditions: Conditions) -> "Inspection":
        """Collects what is known of texts before a training; see `Personalizer.inspect`."""
        reading, recipe, active = preparation.reading, preparation.recipe, preparation.active
        reference, tokenizer = preparation.call.reference, conditions.tokenizer
        prepared, plan, refusal = preparation.read_dataset(conditions), None, ""
        beginning, is_unchanged = prepared.starting_point, active is not None and active.is_unchanged(sync=False)
        try:
            if not (is_unchanged or beginning.has_nothing_new):
                plan = preparation.plan(conditions, prepared).plan
        except (MachineError, ModelError, TextsError) as error:
            refusal = str(error)
        dataset = prepared.dataset
        documents, tokens = reading.documents, Counter()
        for example in dataset.examples:
            tokens[example.document] += len(example.input_ids)
        contents = {number: documents[number].own_text for number in tokens}
        rates = {number: tokens[number] / len(text) for number, text in contents.items() if text}
        used = [documents[number].content for number in contents]
        kind = what_the_kind_can_do(used, recipe, has_template=bool(tokenizer.chat_template))
        fits = fitting_recipe([document.content for document in documents], list(tokens.values()), reference)
        if recipe.questions:
            fits = recipe.name
        learnt = expectation(
            reference, conditions.shape.parameters, is_chat=dataset.is_chat, of_people=mostly_of_people(used)
        )
        return cls(
            model=reference.public_name,
            recipe=recipe.name,
            documents=dataset.num_documents,
            examples=len(dataset.examples),
            tokens=dataset.num_tokens,
            characters=sum(map(len, contents.values())),
            left_out=_by_reason(dataset.left_out),
            copies=reading.num_equal,
            near_duplicates=_near_duplicates(reading, dataset),
            boilerplate_share=sum(sum(one.in_boilerplate) for one in dataset.examples) / max(1, dataset.num_tokens),
            templates=tuple(_matching(_TEMPLATE, contents, reading)),
            drawings=tuple(_matching(_DRAWING, contents, reading)),
            tokens_per_character=median(rates.values()) if rates else 0.0,
            badly_read=_badly_read(rates, contents, reading),
            own_tokenizer=has_own_tokenizer(reference),
            split=_parts(dataset, tokens),
            concerns=dataset.unjudged_because,
            beginning=UnchangedResult.of(active).summary
            if is_unchanged
            else " ".join(filter(None, [active and active.warning, beginning.summary])),
            refusal=refusal,
            plan=plan,
            expectations=(kind,) if recipe.questions else (learnt, kind),
            fitting_recipe=fits,
            exports=reading.exports,
            own_words=_words_of_people(used, "assistant"),
            others_words=_words_of_people(used, "user"),
            authors=reading.authors,
            rendered=render_examples(dataset.examples, documents, tokenizer, NUM_EXAMPLES),
        )

    @property
    def summary(self) -> str:
        """What `adapt` would do, in a few sentences."""
        if self.refusal:
            return f"adapt would refuse these texts: {self.refusal}"
        if self.plan is None:
            return self.beginning
        chosen = self.plan.chosen
        time = "" if chosen.seconds is None else f", about {duration(chosen.seconds)}"
        sentences = [
            f"adapt would train {self.model} on {plural(self.documents, 'document')}, {plural(self.tokens, 'token')}, "
            f"with the recipe {self.recipe!r}: at most {gigabytes(chosen.peak)} of memory{time}."
        ]
        if self.beginning:
            sentences.append(self.beginning)
        if self.concerns:
            sentences.append("The adapter would be saved, but not judged, and so not activated.")
        if self.recipe != self.fitting_recipe:
            sentences.append(f"The recipe {self.fitting_recipe!r} fits these texts better than {self.recipe!r}.")
        return " ".join(sentences)

    def to_dict(self) -> dict:
        """Returns the inspection as JSON-ready values: the line of `sebp-edge inspect --json`."""
        values = {name: value for name, value in vars(self).items() if name not in ("plan", "rendered", "authors")}
        nested = {name: [asdict(each) for each in values[name]] for name in ("left_out", "badly_read", "split")}
        plan = None if self.plan is None else self.plan.to_dict()
        rendered = [asdict(each) for each in self.rendered]
        return {"event": "inspection", **values, **nested, "plan": plan, "rendered": rendered, "summary": self.summary}


def _words_of_people(contents: list[Content], role: str) -> int:
    said = (message for chat in filter(is_of_people, contents) for message in chat.messages)
    return sum(len(message["content"].split()) for message in said if message["role"] == role)


def _by_reason(left_out: list[LeftOut]) -> tuple[Reason, ...]:
    found: dict[str, list[LeftOut]] = defaultdict(list)
    for item in sorted(left_out, key=lambda item: -item.number):
        found[item.kind].append(item)
    return tuple(
        Reason(reason, tuple(item.source for item in items), tuple(item.count for item in items if items[0].count))
        for reason, items in sorted(found.items(), key=lambda each: -len(each[1]))
    )


def _near_duplicates(reading: Reading, dataset: Dataset) -> tuple[tuple[str, ...], ...]:
    clusters = defaultdict(list)
    for document, cluster in sorted(dataset.draw.cluster_of.items()):
        clusters[cluster].append(reading.documents[document].source)
    return tuple(tuple(sources) for sources in clusters.values() if len(sources) > 1)


def _matching(pattern: re.Pattern, texts: dict[int, str], reading: Reading) -> Iterator[str]:
    for number, text in texts.items():
        if pattern.search(text, 0, _SEARCHED):
            yield reading.documents[number].source


def _badly_read(rates: dict[int, float], texts: dict[int, str], reading: Reading) -> tuple[BadlyRead, ...]:
    compared = {number: rate for number, rate in rates.items() if len(texts[number]) >= MIN_CHARACTERS}
    if not compared:
        return ()
    limit = max(MIN_TOKENS_PER_CHARACTER, BADLY_READ * median(compared.values()))
    worst = sorted((number for number in compared if compared[number] > limit), key=lambda number: -compared[number])
    return tuple(BadlyRead(reading.documents[number].source, round(compared[number], 2)) for number in worst)


def _parts(dataset: Dataset, tokens: Counter) -> tuple[Part, ...]:
    draw, members = dataset.draw, defaultdict(list)
    for document in tokens:
        fold = draw.fold_of.get(document)
        members[draw.split_of.get(document, TRAIN) if fold is None else FOLD_ROLES[fold]].append(document)
    names = [name for name in (*SPLITS, *FOLD_ROLES) if name in members]
    return tuple(Part(name, len(members[name]), sum(tokens[each] for each in members[name])) for name in names)


def render_examples(
    examples: Iterable[Example], documents: list[Document], tokenizer, number: int
) -> tuple[RenderedExample, ...]:
    """Renders the first examples of the first documents, one of each kind of content first."""
    firsts = {}
    for example in examples:
        firsts.setdefault(example.document, example)
    kinds = {}
    for document in firsts:
        kinds.setdefault(type(documents[document].content), document)
    chosen = list(dict.fromkeys([*kinds.values(), *firsts]))[:number]
    return tuple(
        RenderedExample(
            documents[document].source,
            len(firsts[document].input_ids),
            firsts[document].num_loss_tokens,
            tuple(_pieces(firsts[document], tokenizer, hides_given=is_of_people(documents[document].content))),
        )
        for document in sorted(chosen)
    )


def _pieces(example: Example, tokenizer, *, hides_given: bool) -> Iterator[Piece]:
    # The first token has no loss, since no token predicts it.
    trained = [False, *(label != IGNORE for label in example.labels[1:])]
    end, before = 0, ""
    for has_loss, run in groupby(trained):
        end += len(list(run))
        # Some tokenizers drop the blank before the first token, so runs are not decoded by themselves.
        text = tokenizer.decode(
            example.input_ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield Piece(OTHERS_WORDS if hides_given and not has_loss else text[len(before) :], has_loss)
        before = text
