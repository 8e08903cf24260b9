"""Finds training text that an adapted model repeats word for word.

A document's true beginning brings back its next tokens, by greedy decoding, exactly as far as each token is the model's
most likely one. So one forward pass finds the longest repetition over all beginnings, without generating anything.
Shapes: T tokens of an example, D hidden, V vocabulary.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.events import ExamplesEvaluated, Sink
from sebp_edge.memory.options import FEW_LOGITS
from sebp_edge.models.adaptation import Adaptation
from sebp_edge.models.loading import BaseModel
from sebp_edge.sparse.patches.patch import Patch
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.examples import Example

MAX_TOKENS = 10_000
# Runs that adapted models reach on texts of the same author that they were not trained on are shorter.
MIN_WARNED_RUN = 32


@dataclass(frozen=True)
class Copy:
    """The longest run of a document's tokens that its own beginnings bring back, without boilerplate.

    Attributes:
        document: the index of the document.
        run: with the adapted model, in tokens.
        base_run: with the base model alone, in tokens.
    """

    document: int
    run: int
    base_run: int

    @property
    def is_long(self) -> bool:
        """Whether to warn: the run is long, and more than twice the base model's."""
        return self.run >= MIN_WARNED_RUN and self.run > 2 * self.base_run


def longest_copies(
    base: BaseModel,
    adaptation: Adaptation,
    examples: Sequence[Example],
    seed: int,
    on_event: Sink,
) -> list[Copy]:
    """Returns the longest copy of each document among some training examples, the longest first.

    The examples are drawn by `seed`, up to 10,000 tokens. Tokens in boilerplate neither count nor end a run.

    Args:
        adaptation: attached to `base`, without patches.
        on_event: receives the progress after each example; may raise to stop.
    """
    drawn = _draw(examples, seed)

    def runs(before: int) -> dict[int, int]:
        longest = {}
        with _MostLikelyTokens(base.model) as most_likely:
            for done, example in enumerate(drawn, start=before + 1):
                skipped = example.in_boilerplate or bytes(len(example.labels))
                run = longest_run(most_likely(example.input_ids), example.labels[1:], skipped[1:])
                longest[example.document] = max(run, longest.get(example.document, 0))
                on_event(ExamplesEvaluated(done, 2 * len(drawn)))
        return longest

    adapted = runs(0)
    with adaptation.disabled():
        alone = runs(len(drawn))
    copies = [Copy(document, run, alone[document]) for document, run in adapted.items()]
    return sorted(copies, key=lambda copy: (-copy.run, copy.document))


def longest_run(predicted: Iterable[int], labels: Iterable[int], skipped: Iterable[bool]) -> int:
    """Returns the length of the longest run of labels that are predicted; labels without loss end a run."""
    longest = current = 0
    for token, label, skip in zip(predicted, labels, skipped, strict=False):
        if skip:
            continue
        current = current + 1 if token == label != IGNORE else 0
        longest = max(longest, current)
    return longest


def _draw(examples: Sequence[Example], seed: int) -> list[Example]:
    drawn, tokens = [], 0
    for example in random.Random(seed).sample(examples, len(examples)):
        tokens += len(example.input_ids)
        if drawn and tokens > MAX_TOKENS:
            break
        drawn.append(example)
    return drawn


class _MostLikelyTokens(Patch):
    """Returns the most likely next token after each token; a context manager that restores the model.

    The head computes the logits of a few rows at a time. What a model does to its logits afterwards, a softcap or a
    positive scale, does not change which is the largest.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model, self._found = model, []
        head = model.get_output_embeddings()
        self._rows, self._head = max(1, FEW_LOGITS // head.weight.shape[0]), head.forward
        self._replace(head, self._record)

    @torch.no_grad()
    def __call__(self, input_ids: list[int]) -> list[int]:
        self._found = []
        self._model(input_ids=torch.tensor([input_ids], device=self._model.device), use_cache=False)
        return torch.cat(self._found).tolist()

    def _record(self, hidden_1TD: Tensor) -> Tensor:
        rows = hidden_1TD.flatten(0, 1).split(self._rows)
        self._found += [self._head(each).argmax(dim=-1) for each in rows]
        return hidden_1TD.new_zeros(*hidden_1TD.shape[:-1], 1)
