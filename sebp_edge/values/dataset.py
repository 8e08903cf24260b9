"""Examples of all documents in their splits, and what a model is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from sebp_edge.values.documents import LeftOut
from sebp_edge.values.draw import MIN_CLUSTERS, Draw, Split
from sebp_edge.values.example import Example, Outline

_TOO_FEW = (
    f"The gate needs at least {MIN_CLUSTERS} documents that are not copies of each other to judge an adapter; give "
    "more documents."
)


@dataclass(frozen=True)
class QuizQuestion:
    """A question of a quiz, as tokens.

    Attributes:
        answers: each of which is right.
        alone: without a passage; empty if it is not asked so.
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


class Probes(NamedTuple):
    """What shows how much of what a model could before is left.

    Attributes:
        examples: general texts, then four texts for each item: a right one, a wrong one, and the same of its neighbour;
            their numbers are those of the examples' documents.
        num_general: the number of general texts.
        num_language, num_facts: the numbers of items.
    """

    examples: list[Example]
    num_general: int
    num_language: int
    num_facts: int


class Outlines(NamedTuple):
    """The outlines of a dataset's examples, by what they are for."""

    own: list[Outline]
    general: list[Outline]


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
        return self.examples + self.general

    @cached_property
    def outlines(self) -> Outlines:
        """What the tokens are not needed for is done with these."""
        numbers = count()
        parts = (self.examples, self.general)
        return Outlines(*([example.outline(next(numbers)) for example in part] for part in parts))

    def splits(self) -> list[Split]:
        """Returns one split, one for each fold, or nothing if nothing can be judged (see `Draw.splits`)."""
        return self.draw.splits(self.outlines.own)

    def general_beside(self, own: Sequence[Outline], share: float) -> list[Outline]:
        """Returns general examples of at most `share` of the tokens of a training on `own`; all, if a quiz decides."""
        general = self.outlines.general
        if self.quiz is not None:
            return general
        own_tokens, tokens = (sum(example.num_tokens for example in part) for part in (own, general))
        number = int(min(1, share * own_tokens / max(1, tokens)) * len(general))
        return [general[place * len(general) // number] for place in range(number)]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples, without padding."""
        return sum(example.num_tokens for example in self.examples)

    @property
    def padding_share(self) -> float:
        """The share of padding if all examples are padded to the context length."""
        return 1 - self.num_tokens / max(1, len(self.examples) * self.context_length)
