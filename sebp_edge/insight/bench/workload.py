"""What a step is timed on: a few texts of lengths as the user's own have, or of a built-in spread, and their padding.

Only lengths and the places of losses are taken from texts; the tokens are random, since no time depends on them.
"""

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

import torch

from sebp_edge.errors import TextsError
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch, Collator
from sebp_edge.texts.examples import Example

# Tokens of a paragraph in real notes: the median, and of one in ten at least.
MEDIAN_LENGTH, NINETIETH_LENGTH = 30, 90


def built_in_lengths(count: int) -> list[int]:
    """Tokens of `count` short texts, spread evenly over the log-normal that has the median and the 90th percentile."""
    spread = math.log(NINETIETH_LENGTH / MEDIAN_LENGTH) / NormalDist().inv_cdf(0.9)
    places = (NormalDist().inv_cdf((number + 0.5) / count) for number in range(count))
    return [max(2, round(MEDIAN_LENGTH * math.exp(spread * place))) for place in places]


def built_in_examples(count: int) -> list[Example]:
    """Texts of the built-in lengths, all of whose tokens are learnt."""
    return [Example([0] * length, [0] * length, number) for number, length in enumerate(built_in_lengths(count))]


def spread_out(examples: list[Example], count: int) -> list[Example]:
    """`count` of the examples, spread evenly over their lengths; all of them if there are no more."""
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    if len(by_length) <= count:
        return by_length
    return [by_length[int((number + 0.5) * len(by_length) / count)] for number in range(count)]


def parse_share(text: str) -> float:
    """Reads "90%" or "0.9".

    Raises:
        TextsError: it is neither, or not between 0 and 1.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text, re.ASCII)
    share = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 <= share < 1:
        raise TextsError(f"The padding is {text!r}, but must be a share of the batch below 1, such as '90%' or 0.9.")
    return share


def padded_to(examples: list[Example], share: float) -> int:
    """The context length at which at least `share` of the padded batch is padding.

    Raises:
        TextsError: the longest example is longer.
    """
    lengths = [len(example.input_ids) for example in examples]
    context_length = math.ceil(sum(lengths) / len(lengths) / (1 - share) - 1e-9)
    if context_length < max(lengths):
        least = 1 - sum(lengths) / len(lengths) / max(lengths)
        raise TextsError(
            f"Of texts of {min(lengths)} to {max(lengths)} tokens at least {math.ceil(100 * least)}% is padding; "
            f"ask for as much, not for {share:.0%}."
        )
    return context_length


@dataclass(frozen=True)
class Workload:
    """One batch, and how it looks from outside.

    Attributes:
        lengths: tokens of each example, increasing.
        loss_tokens: tokens that are predicted.
    """

    batch: Batch
    lengths: list[int]
    loss_tokens: int

    @classmethod
    def of(cls, examples: list[Example], context_length: int, vocabulary: int, device: torch.device) -> "Workload":
        """Lays random tokens out as `examples` are, cut to the context length; the same ones each time."""
        draw = torch.Generator().manual_seed(0)
        filled = []
        for example in sorted(examples, key=lambda example: len(example.input_ids)):
            labels = example.labels[:context_length]
            ids = torch.randint(0, vocabulary, (len(labels),), generator=draw).tolist()
            with_loss = [token if label != IGNORE else IGNORE for token, label in zip(ids, labels, strict=True)]
            filled.append(Example(ids, with_loss, example.document))
        batch = Collator(context_length, 0)(filled)
        tensors = (each.to(device) for each in (batch.input_ids, batch.attention_mask, batch.labels))
        return cls(
            Batch(*tensors, batch.plan.to(device)),
            [len(example.input_ids) for example in filled],
            sum(example.num_loss_tokens for example in filled),
        )

    @property
    def tokens(self) -> int:
        """Real tokens of the batch."""
        return sum(self.lengths)

    @property
    def context_length(self) -> int:
        return self.batch.input_ids.shape[1]

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.batch.input_ids.numel()
