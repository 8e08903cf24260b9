"""The batch that steps are timed on: a few padded texts, with the lengths of the user's texts or built-in ones.

Only the lengths and the loss positions of texts are used; tokens are random, since no time depends on them.
"""

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

import torch

from sebp_edge.basics.units import percent
from sebp_edge.errors import OptionError
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch, Collator
from sebp_edge.texts.examples import Example

# Tokens of a paragraph of real notes: the median and the 90th percentile.
MEDIAN_LENGTH, NINETIETH_LENGTH = 30, 90


def built_in_lengths(count: int) -> list[int]:
    """Token counts of `count` short texts: evenly spaced quantiles of the log-normal with these two percentiles."""
    spread = math.log(NINETIETH_LENGTH / MEDIAN_LENGTH) / NormalDist().inv_cdf(0.9)
    quantiles = (NormalDist().inv_cdf((number + 0.5) / count) for number in range(count))
    return [max(2, round(MEDIAN_LENGTH * math.exp(spread * quantile))) for quantile in quantiles]


def built_in_examples(count: int) -> list[Example]:
    """Examples of the built-in lengths, with a loss on every token."""
    return [Example([0] * length, [0] * length, number) for number, length in enumerate(built_in_lengths(count))]


def pick_spread_lengths(examples: list[Example], count: int) -> list[Example]:
    """Picks `count` examples, evenly spaced when sorted by length; all of them if there are no more."""
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    if len(by_length) <= count:
        return by_length
    return [by_length[int((number + 0.5) * len(by_length) / count)] for number in range(count)]


def parse_share(text: str) -> float:
    """Parses a share such as "90%" or "0.9"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text, re.ASCII)
    share = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 <= share < 1:
        raise OptionError(f"The padding must be a share of the batch below 1, such as '90%' or 0.9, but is {text!r}.")
    return share


def padded_length(examples: list[Example], share: float) -> int:
    """The smallest context length at which at least `share` of the padded batch is padding."""
    lengths = [len(example.input_ids) for example in examples]
    context_length = math.ceil(sum(lengths) / len(lengths) / (1 - share) - 1e-9)
    if context_length < max(lengths):
        least = 1 - sum(lengths) / len(lengths) / max(lengths)
        raise OptionError(
            f"A batch of texts of {min(lengths)} to {max(lengths)} tokens has at least {math.ceil(100 * least)} % "
            f"padding; ask for that or more instead of {percent(share, 0)}."
        )
    return context_length


@dataclass(frozen=True)
class Workload:
    """One batch and its sizes.

    Attributes:
        lengths: tokens of each example, in increasing order.
    """

    batch: Batch
    lengths: list[int]
    loss_tokens: int

    @classmethod
    def of(cls, examples: list[Example], context_length: int, vocabulary: int, device: torch.device) -> "Workload":
        """Fills `examples`, cut to the context length, with random tokens; they are the same each time."""
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
