"""Makes the dataset of a user's texts: its examples, their splits, and what was left out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import NamedTuple

from sebp_edge.lessons.boilerplate import common_lines
from sebp_edge.lessons.concerns import find_concerns
from sebp_edge.lessons.examples import Example, Outline, encode
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import MIN_CLUSTERS, Draw, Split, draw_splits
from sebp_edge.recipe import Recipe
from sebp_edge.values.documents import LeftOut
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory

_TOO_FEW = (
    f"The gate needs at least {MIN_CLUSTERS} documents that are not copies of each other to judge an adapter; give "
    "more documents."
)


@dataclass(frozen=True)
class Drawing:
    """What the splits of documents are drawn from.

    Attributes:
        seed: decides about new documents.
        earlier: the documents of earlier versions of the adapter, which keep their splits, and the salt.
        keeps: whether all documents keep them, however few are left in one.
    """

    seed: int
    earlier: SplitHistory = field(default_factory=SplitHistory)
    keeps: bool = False


@dataclass(frozen=True)
class QuizQuestion:
    """A question of a quiz, as tokens.

    Attributes:
        answers: each of which is right.
        found, right: the question below the passage that the search finds, and below the one with the answer; None for
            a question that is not about notes.
    """

    question: str
    answers: tuple[str, ...]
    alone: tuple[int, ...]
    found: tuple[int, ...] | None = None
    right: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Quiz:
    """What a model is asked before and after a training.

    Attributes:
        about_notes: about documents of the test split.
        general: about the world.
        refused: how many of the first the search would refuse to answer.
        rightly_refused: how many it would refuse rightly if the documents that they are about were not there.
    """

    about_notes: tuple[QuizQuestion, ...]
    general: tuple[QuizQuestion, ...]
    refused: int
    rightly_refused: int


class Outlines(NamedTuple):
    """The outlines of a dataset's examples, by what they are for."""

    own: list[Outline]
    general: list[Outline]
    probe: list[Outline]

    @property
    def trained(self) -> list[Outline]:
        """All that a training on all documents uses."""
        return self.own + self.general


@dataclass(frozen=True)
class Dataset:
    """Examples of at most `context_length` tokens.

    Splits, schedules and evaluations have their outlines; `all_examples` has the tokens.

    Attributes:
        num_documents: the number of documents that the examples come from.
        draw: the split of each document, and what it is recognised by.
        concerns: what makes a gain on these texts meaningless, a sentence each.
        is_chat: whether the chat template rendered more than half of these documents.
        general: examples that keep what the model could do before, with the base model as the teacher.
        probe: other general text, which tells how much was forgotten.
        quiz: what decides, in place of the test loss; None if nothing is asked.
    """

    examples: list[Example]
    context_length: int
    num_documents: int
    left_out: list[LeftOut]
    draw: Draw
    concerns: tuple[str, ...] = ()
    is_chat: bool = False
    names: dict[int, str] = field(default_factory=dict)
    general: list[Example] = field(default_factory=list)
    probe: list[Example] = field(default_factory=list)
    quiz: Quiz | None = None

    @property
    def unjudged_because(self) -> tuple[str, ...]:
        """Why the gate will judge nothing, a sentence each; empty if it will."""
        if self.draw.kind == "none":
            return (*self.concerns, _TOO_FEW)
        return self.concerns

    @property
    def all_examples(self) -> list[Example]:
        """All examples, by the numbers of their outlines."""
        return self.examples + self.general + self.probe

    @cached_property
    def outlines(self) -> Outlines:
        """What the tokens are not needed for is done with these."""
        numbers = count()
        parts = (self.examples, self.general, self.probe)
        return Outlines(*([example.outline(next(numbers)) for example in part] for part in parts))

    def splits(self) -> list[Split]:
        """Returns one split, three folds, or nothing if nothing can be judged (see `Draw.splits`)."""
        general = self.outlines.general
        return [replace(split, train=split.train + general) for split in self.draw.splits(self.outlines.own)]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples, without padding."""
        return sum(example.num_tokens for example in self.examples)

    @property
    def padding_share(self) -> float:
        """The share of padding if all examples are padded to the context length."""
        return 1 - self.num_tokens / max(1, len(self.examples) * self.context_length)


def make_dataset(
    reading: Reading,
    tokenizer,
    recipe: Recipe,
    model_limit: int | None,
    drawing: Drawing,
    progress: Progress = SILENT,
    encode: Callable[..., tuple[list[Example], list[LeftOut]]] = encode,
) -> Dataset:
    """Encodes documents as examples and draws their splits.

    Args:
        recipe: sets the context length and whether to use the chat template.
        model_limit: the maximum sequence length that the model supports; None if it has no limit.
        encode: makes the examples of the documents.

    Raises:
        ModelError: see `encode`.
    """
    context_length = min(recipe.context_length, model_limit or recipe.context_length)
    texts = {number: document.own_text for number, document in enumerate(reading.documents)}
    fingerprints = take_fingerprints(texts, drawing.earlier.salt, progress)
    draw = progress.run(lambda: draw_splits(fingerprints, drawing.seed, drawing.earlier, keeps=drawing.keeps))
    lines = progress.run(lambda: common_lines(texts, draw.cluster_of))
    examples, left_out = encode(
        reading.documents,
        tokenizer,
        context_length,
        chat_template=recipe.chat_template,
        common_lines=lines,
        progress=progress,
    )
    used = sorted({example.document for example in examples})
    if len(used) < len(texts):
        are_used = set(used)
        fingerprints = {number: fingerprints[number] for number in fingerprints if number in are_used}
        draw = progress.run(lambda: draw_splits(fingerprints, drawing.seed, drawing.earlier, keeps=drawing.keeps))
    chats = {example.document for example in examples if example.is_chat}
    return Dataset(
        examples,
        context_length,
        len(used),
        reading.left_out + left_out,
        draw,
        progress.run(
            lambda: find_concerns([texts[number] for number in used], draw.cluster_of, reading.num_equal, tokenizer)
        ),
        is_chat=2 * len(chats) > len(used),
        names={number: name for number in used if (name := reading.documents[number].name) is not None},
    )
