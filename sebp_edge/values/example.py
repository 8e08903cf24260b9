"""A training sequence: its tokens and labels, and its outline without them."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sebp_edge.basics.labels import IGNORE

# The document number of an example that belongs to no document of the user's.
NO_DOCUMENT = -1


class Outline(NamedTuple):
    """An example without its tokens: all that splits, schedules and evaluations need of it.

    Attributes:
        number: the index of the example in the list that its tokens are looked up in.
        document: see `Example`.
        num_tokens, num_active_tokens, num_loss_tokens: its sizes.
        boilerplate: 1 for each loss token in boilerplate, else 0; empty if its text has none.
        num_soft_targets: of each loss token, beside the target.
    """

    number: int
    document: int
    num_tokens: int
    num_active_tokens: int
    num_loss_tokens: int
    boilerplate: bytes = b""
    num_soft_targets: int = 0


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher would predict at each of C loss tokens, as groups of k tokens; kept as arrays, as in examples.

    Attributes:
        ids: token ids, [C * k], each group's most probable token first.
        shares: their shares, [C * k]; those of a group sum to 1.
        k: the size of a group.
    """

    ids: Sequence[int]
    shares: Sequence[float]
    k: int

    def __post_init__(self):
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "shares", array("f", self.shares))


@dataclass(frozen=True)
class Example:
    """One training sequence; any sequences of numbers are kept as arrays, which are compact.

    Attributes:
        input_ids: its token ids, after the tokenizer's BOS. If the tokenizer sets none, each later chunk of a text
            begins with the last token of the chunk before.
        labels: the ids of tokens with loss, not shifted; -100 for all others.
        document: the index of its document, or of its section if a few documents were cut into sections.
        in_boilerplate: 1 for each label whose token begins in a line that is common to many documents, else 0; empty
            if its text has no such line.
        teacher: what a teacher finds probable at each loss token, which the example's loss then is the cross-entropy
            with; None for the labels themselves.
        is_chat: whether its document is a conversation, or was rendered as one.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]
    document: int
    in_boilerplate: bytes = b""
    teacher: TeacherTokens | None = None
    is_chat: bool = False

    def __post_init__(self):
        for name in ("input_ids", "labels"):
            object.__setattr__(self, name, array("i", getattr(self, name)))

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @cached_property
    def num_loss_tokens(self) -> int:
        """The number of loss tokens. The first token is never one, since no token predicts it."""
        return len(self.labels[1:]) - self.labels[1:].count(IGNORE)

    @cached_property
    def num_active_tokens(self) -> int:
        """The number of active rows: those up to the last token that predicts a loss token."""
        return next((position for position in range(len(self.labels) - 1, 0, -1) if self.labels[position] != IGNORE), 0)

    @cached_property
    def num_tokens_before_loss(self) -> int:
        """The number of active rows before the first loss row."""
        return next((position for position, label in enumerate(self.labels[1:]) if label != IGNORE), 0)

    def outline(self, number: int) -> Outline:
        """Returns all but the tokens, for the example of this number."""
        rows = zip(self.in_boilerplate[1:], self.labels[1:], strict=False)
        return Outline(
            number,
            self.document,
            self.num_tokens,
            self.num_active_tokens,
            self.num_loss_tokens,
            bytes(flag for flag, label in rows if label != IGNORE),
            0 if self.teacher is None else self.teacher.k - 1,
        )


def outlines(examples: Iterable[Example]) -> list[Outline]:
    """Returns the outlines of examples, numbered in their order."""
    return [example.outline(number) for number, example in enumerate(examples)]
