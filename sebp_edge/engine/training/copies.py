"""Finds training text that an adapted model repeats word for word.

A document's true beginning brings back its next tokens, by greedy decoding, exactly as far as each token is the model's
most likely one. So one forward pass finds the longest repetition over all beginnings, without generating anything.
Shapes: B examples, T tokens of the longest, D hidden.
"""

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sebp_edge.basics.labels import IGNORE
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.memory_options import FASTEST, FEW_LOGITS, MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.sparse.patches.patch import Patch
from sebp_edge.engine.sparse.patches.stops import Stops
from sebp_edge.engine.sparse.rows.schedule import RowLimit
from sebp_edge.engine.training.scoring import in_micro_batches
from sebp_edge.events import Sink
from sebp_edge.values.example import Example, Outline, outlines
from sebp_edge.values.training_facts import Copied

# Of a long run. Those that adapted models reach on texts of the author that they were not trained on are shorter.
MIN_WARNED_RUN = 32


def longest_copies(
    base: BaseModel,
    adaptation: Adaptation,
    examples: Sequence[Example],
    names: Sequence[str],
    seed: int,
    max_tokens: int,
    on_event: Sink,
    options: MemoryOptions = FASTEST,
    check: Check = lambda: None,
) -> list[Copied]:
    """Returns the longest copy of each document among some training examples, if that is long, the longest first.

    The examples are drawn by `seed`, up to `max_tokens`. Tokens in boilerplate neither count nor end a run. The base
    model computes only the documents with a long run.

    Args:
        adaptation: attached to `base`, without patches.
        names: the sources of all documents.
        on_event: receives the progress after each micro-batch; may raise to stop.
        check: called several times within a micro-batch; may raise to stop.
    """
    limit = RowLimit.on(base.device.type, options.max_rows, pads=True)

    def longest_runs(drawn: list[Example]) -> dict[int, int]:
        def predict(micro_batch: list[Outline]) -> list[list[int]]:
            return most_likely([drawn[outline.number].input_ids for outline in micro_batch])

        longest = {}
        with Stops(base.model, check), _MostLikelyTokens(base.model) as most_likely:
            for micro_batch, predicted in in_micro_batches(predict, outlines(drawn), limit, base.device, on_event):
                for outline, tokens in zip(micro_batch, predicted, strict=True):
                    example = drawn[outline.number]
                    skipped = example.in_boilerplate or bytes(len(example.labels))
                    run = longest_run(tokens, example.labels[1:], skipped[1:])
                    longest[example.document] = max(run, longest.get(example.document, 0))
        return longest

    drawn = _draw(examples, seed, max_tokens)
    adapted = {document: run for document, run in longest_runs(drawn).items() if run >= MIN_WARNED_RUN}
    with adaptation.disabled():
        alone = longest_runs([example for example in drawn if example.document in adapted])
    longest = sorted(adapted.items(), key=lambda item: (-item[1], item[0]))
    return [Copied(names[document], run, alone[document]) for document, run in longest]


def longest_run(predicted: Iterable[int], labels: Iterable[int], skipped: Iterable[bool]) -> int:
    """Returns the length of the longest run of labels that are predicted; labels without loss end a run."""
    longest = current = 0
    for token, label, skip in zip(predicted, labels, skipped, strict=False):
        if skip:
            continue
        current = current + 1 if token == label != IGNORE else 0
        longest = max(longest, current)
    return longest


def _draw(examples: Sequence[Example], seed: int, max_tokens: int) -> list[Example]:
    drawn, tokens = [], 0
    for example in random.Random(seed).sample(examples, len(examples)):
        tokens += len(example.input_ids)
        if drawn and tokens > max_tokens:
            break
        drawn.append(example)
    return drawn


class _MostLikelyTokens(Patch):
    """Returns the most likely next token after each token of sequences; a context manager that restores the model.

    The head computes the logits of a few rows at a time. What a model does to its logits afterwards, a softcap or a
    positive scale, does not change which is the largest.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model, self._likeliest = model, []
        head = model.get_output_embeddings()
        self._rows, self._head = max(1, FEW_LOGITS // head.weight.shape[0]), head.forward
        self._replace(head, self._record)

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        # A causal model computes the same with padding on the right.
        input_ids_BT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
        for row, sequence in zip(input_ids_BT, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        self._likeliest = []
        self._model(input_ids=input_ids_BT.to(self._model.device), use_cache=False)
        tokens_BT = torch.cat(self._likeliest).view_as(input_ids_BT).tolist()
        return [tokens[: len(sequence)] for tokens, sequence in zip(tokens_BT, sequences, strict=True)]

    def _record(self, hidden_BTD: Tensor) -> Tensor:
        rows = hidden_BTD.flatten(0, 1).split(self._rows)
        self._likeliest += [self._head(some).argmax(dim=-1) for some in rows]
        return hidden_BTD.new_zeros(*hidden_BTD.shape[:-1], 1)
