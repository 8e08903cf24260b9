"""Computes held-out losses by document, apart for boilerplate, and counts the words that were guessed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from sebp_edge.engine.sparse.rows.schedule import Group, Schedule
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.engine.training.words import WordReader
from sebp_edge.values.example import Example, Outline


@dataclass
class HeldOutLoss:
    """The loss of each document in nats, and its number of loss tokens."""

    # Those of all loss tokens.
    nats: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    # Those of the loss tokens in boilerplate; without documents that have none.
    boilerplate_nats: dict[int, float] = field(default_factory=dict)
    boilerplate_tokens: dict[int, int] = field(default_factory=dict)
    # The `WordCounts` of each document; empty if no words were read.
    characters: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    words: dict[int, int] = field(default_factory=dict)
    guessed: dict[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Nats per token over all documents; NaN without tokens."""
        return sum(self.nats.values()) / sum(self.tokens.values()) if self.tokens else math.nan

    @property
    def boilerplate(self) -> "HeldOutLoss":
        """The loss on boilerplate, of the documents that have some."""
        return HeldOutLoss(dict(self.boilerplate_nats), dict(self.boilerplate_tokens))

    @property
    def rest(self) -> "HeldOutLoss":
        """The loss on all but boilerplate, of the documents that have such tokens."""
        tokens = {document: count - self.boilerplate_tokens.get(document, 0) for document, count in self.tokens.items()}
        tokens = {document: count for document, count in tokens.items() if count}
        nats = {document: self.nats[document] - self.boilerplate_nats.get(document, 0.0) for document in tokens}
        return HeldOutLoss(nats, tokens)

    def only(self, documents: Iterable[int]) -> "HeldOutLoss":
        """The loss of some of the documents."""
        return self.renumbered({number: number for number in documents})

    def renumbered(self, number_of: Mapping[int, int]) -> "HeldOutLoss":
        """The loss of the documents that have a new number, by that."""
        return HeldOutLoss(
            *({number_of[n]: value for n, value in part.items() if n in number_of} for part in vars(self).values())
        )

    @classmethod
    def merged(cls, parts: Sequence["HeldOutLoss"]) -> "HeldOutLoss":
        """Merges the losses of several folds, which share no document."""
        merged = cls()
        for part in parts:
            for name, values in vars(part).items():
                getattr(merged, name).update(values)
        return merged


class BaseLosses:
    """The base model's losses on held-out documents; each is computed once, those of all tests at the same time.

    Args:
        tests: the schedules whose test documents are computed together.
        known: losses that need not be computed.
    """

    def __init__(self, tests: Sequence[Schedule] = (), known: HeldOutLoss | None = None):
        self._tests, self._known = tests, known or HeldOutLoss()

    def knows(self, group: Group) -> bool:
        """Whether a group needs no computation."""
        return all(example.document in self._known.nats for example in group.examples)

    def of(self, group: Group) -> HeldOutLoss:
        """Returns the known losses of a group."""
        return self._known.only({example.document for example in group.examples})

    def compute(self, learner: RecoveringLearner, group: Group) -> None:
        """Computes what is not known of a group and of all tests, with an adaptation that has no effect now."""
        # The words of validation documents that are not tested are not asked for.
        for tested, reads_words in (*((schedule.test, True) for schedule in self._tests), (group, False)):
            new = [example for example in tested.examples if example.document not in self._known.nats]
            if new:
                part = tested if len(new) == len(tested.examples) else Group(new, learner.limit, is_evaluated=True)
                self._known = HeldOutLoss.merged([self._known, evaluate(learner, part, reads_words=reads_words)])


def evaluate(learner: RecoveringLearner, group: Group, *, reads_words: bool = False) -> HeldOutLoss:
    """Evaluates a group; returns its losses by document, with its words if the learner can read them."""
    words = learner.plain.words() if reads_words else None
    return sum_by_document(learner.losses(group, reads_words=reads_words), words, learner.row_losses.examples)


def sum_by_document(
    micro_batches: Iterable[tuple[list[Outline], Tensor, Tensor]],
    words: WordReader | None = None,
    examples: Sequence[Example] = (),
) -> HeldOutLoss:
    """Sums the losses of micro-batches by document.

    Args:
        micro_batches: the examples, the losses of their loss rows in nats, fp32 [C], and the example of each loss row,
            int64 [C]; both tensors are on the host. With `words`, instead of the losses what that has read.
        words: counts the words.
        examples: the tokens of all examples, by number.
    """
    result = HeldOutLoss()
    for outlines, found, sequences_C in micro_batches:
        losses_C = found if words is None else found[:, 0]
        _add(result.nats, result.tokens, outlines, losses_C, sequences_C)
        # Loss rows are in the order of the examples and of their loss tokens.
        flags = (example.boilerplate or bytes(example.num_loss_tokens) for example in outlines)
        in_boilerplate = torch.tensor(list(chain.from_iterable(flags)))
        rows = in_boilerplate.nonzero().squeeze(1)
        _add(result.boilerplate_nats, result.boilerplate_tokens, outlines, losses_C[rows], sequences_C[rows])
        if words is not None:
            parts = found.split([example.num_loss_tokens for example in outlines])
            for example, own in zip(outlines, parts, strict=True):
                counts = words.count(examples[example.number], own, example.boilerplate)
                for name, number in counts._asdict().items():
                    of_documents = getattr(result, name)
                    of_documents[example.document] = of_documents.get(example.document, 0) + number
    return result


def _add(
    nats: dict[int, float], tokens: dict[int, int], examples: list[Outline], losses_C: Tensor, sequences_C: Tensor
) -> None:
    """Adds the losses of some rows, and the number of these rows, to those of their documents."""
    sums = torch.zeros(len(examples), dtype=torch.float64).index_add_(0, sequences_C, losses_C.double())
    counts = torch.bincount(sequences_C, minlength=len(examples))
    for example, total, count in zip(examples, sums.tolist(), counts.tolist(), strict=True):
        if count:
            nats[example.document] = nats.get(example.document, 0.0) + total
            tokens[example.document] = tokens.get(example.document, 0) + count
