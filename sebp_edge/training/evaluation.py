"""Computes held-out losses, and decides: a new adapter is kept only if the loss fell by more than a standard error."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import Group
from sebp_edge.training.recovery import RecoveringLearner


@dataclass
class HeldOutLoss:
    """The loss of each document in nats, and its number of loss tokens."""

    nats: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Nats per token over all documents."""
        return sum(self.nats.values()) / sum(self.tokens.values())

    @classmethod
    def merged(cls, parts: Sequence["HeldOutLoss"]) -> "HeldOutLoss":
        """Merges the losses of several folds, which share no document."""
        merged = cls()
        for part in parts:
            merged.nats |= part.nats
            merged.tokens |= part.tokens
        return merged


def evaluate(learner: RecoveringLearner, group: Group) -> HeldOutLoss:
    """Evaluates a group; returns its losses by document."""
    return sum_by_document(learner.losses(group))


def sum_by_document(micro_batches: Iterable[tuple[list[Example], Tensor, Tensor]]) -> HeldOutLoss:
    """Sums the losses of micro-batches by document.

    Args:
        micro_batches: the examples, the losses of their loss rows in nats, fp32 [C], and the example of each loss row,
            int64 [C]; both tensors are on the host.
    """
    result = HeldOutLoss()
    for examples, losses, sequences in micro_batches:
        nats = torch.zeros(len(examples), dtype=torch.float64).index_add_(0, sequences, losses.double())
        for example, own in zip(examples, nats.tolist(), strict=True):
            result.nats[example.document] = result.nats.get(example.document, 0.0) + own
            result.tokens[example.document] = result.tokens.get(example.document, 0) + example.num_loss_tokens
    return result


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
