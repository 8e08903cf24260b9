"""Computes held-out losses, and decides: a new adapter is kept only if the loss fell by more than a standard error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import Group
from sebp_edge.training.recovery import RecoveringLearner


@dataclass
class HeldOutLoss:
    """The loss of each document in nats, and its number of loss tokens.

    Attributes:
        nats, tokens: those of all loss tokens.
        boilerplate_nats, boilerplate_tokens: those of the loss tokens in boilerplate; without documents that have none.
    """

    nats: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    boilerplate_nats: dict[int, float] = field(default_factory=dict)
    boilerplate_tokens: dict[int, int] = field(default_factory=dict)

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

    @classmethod
    def merged(cls, parts: Sequence["HeldOutLoss"]) -> "HeldOutLoss":
        """Merges the losses of several folds, which share no document."""
        merged = cls()
        for part in parts:
            merged.nats |= part.nats
            merged.tokens |= part.tokens
            merged.boilerplate_nats |= part.boilerplate_nats
            merged.boilerplate_tokens |= part.boilerplate_tokens
        return merged


def evaluate(learner: RecoveringLearner, group: Group) -> HeldOutLoss:
    """Evaluates a group; returns its losses by document."""
    result = HeldOutLoss()
    for examples, losses_C, sequences_C in learner.losses(group):
        _add(result.nats, result.tokens, examples, losses_C, sequences_C)
        # Loss rows are in the order of the examples and of their loss tokens.
        in_boilerplate = torch.tensor(list(chain.from_iterable(example.loss_in_boilerplate for example in examples)))
        rows = in_boilerplate.nonzero().squeeze(1)
        _add(result.boilerplate_nats, result.boilerplate_tokens, examples, losses_C[rows], sequences_C[rows])
    return result


def _add(
    nats: dict[int, float], tokens: dict[int, int], examples: list[Example], losses_C: Tensor, sequences_C: Tensor
) -> None:
    """Adds the losses of some rows, and the number of these rows, to those of their documents."""
    sums = torch.zeros(len(examples), dtype=torch.float64).index_add_(0, sequences_C, losses_C.double())
    counts = torch.bincount(sequences_C, minlength=len(examples))
    for example, total, count in zip(examples, sums.tolist(), counts.tolist(), strict=True):
        if count:
            nats[example.document] = nats.get(example.document, 0.0) + total
            tokens[example.document] = tokens.get(example.document, 0) + count


@dataclass(frozen=True)
class Comparison:
    """By how much the loss fell, in nats per token, and the standard error of that."""

    fall: float
    standard_error: float

    @property
    def kept(self) -> bool:
        """Whether to keep the adapter."""
        return self.fall > self.standard_error


def compare(before: HeldOutLoss, after: HeldOutLoss) -> Comparison:
    """Compares two losses of the same documents.

    The fall is a ratio of two sums over documents (nats saved, tokens); its standard error is the ratio estimator's,
    with documents as the sampling units (Cochran, Sampling Techniques, 3rd ed., equation 6.13). A NaN is never kept.
    """
    saved = {document: before.nats[document] - after.nats[document] for document in before.nats}
    total = sum(before.tokens.values())
    fall = sum(saved.values()) / total
    residuals = sum((saved[document] - fall * before.tokens[document]) ** 2 for document in saved)
    count = len(saved)
    return Comparison(fall, math.sqrt(residuals * count / (count - 1)) / total)
