"""Finds training text that an adapted model repeats word for word.

A document's true beginning brings back its next tokens, by greedy decoding, exactly as far as each token is the model's
most likely one. So one forward pass finds the longest repetition over all beginnings, without generating anything.
"""

import random
from collections.abc import Iterable, Sequence

import torch

from sebp_edge.basics.labels import IGNORE
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.scoring import in_micro_batches
from sebp_edge.events import Sink, silent
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
        check: called several times within a micro-batch on the CPU; may raise to stop.
    """
    drawn = _draw(examples, seed, max_tokens)
    collator = Collator(None, base.pad_token_id)
    with (
        torch.no_grad(),
        RowLosses(adaptation.model, drawn, collator, base.device, silent, options, check) as row_losses,
    ):

        def likeliest(micro_batch: list[Outline]) -> list[int]:
            return torch.cat([logits.argmax(dim=-1) for logits in row_losses.row_logits(micro_batch)]).tolist()

        def longest_runs(scored: list[Outline]) -> dict[int, int]:
            longest = dict.fromkeys((outline.document for outline in scored), 0)
            found = in_micro_batches(likeliest, scored, row_losses.limit, base.device, on_event)
            for micro_batch, tokens in found:
                # Loss rows are in the order of the examples and of their loss tokens.
                predicted = iter(tokens)
                for outline in micro_batch:
                    example = drawn[outline.number]
                    skipped = example.in_boilerplate or bytes(len(example.labels))
                    run = longest_run(predicted, example.labels[1:], skipped[1:])
                    longest[outline.document] = max(run, longest[outline.document])
            return longest

        scored = outlines(drawn)
        adapted = {document: run for document, run in longest_runs(scored).items() if run >= MIN_WARNED_RUN}
        with adaptation.without_effect():
            alone = longest_runs([outline for outline in scored if outline.document in adapted])
    longest = sorted(adapted.items(), key=lambda item: (-item[1], item[0]))
    return [Copied(names[document], run, alone[document]) for document, run in longest]


def longest_run(predicted: Iterable[int], labels: Iterable[int], skipped: Iterable[bool]) -> int:
    """Returns the length of the longest run of labels that are predicted; labels without loss end a run.

    Args:
        predicted: the most likely token for each label with a loss; of an iterator, only so many are consumed.
    """
    predicted, longest, current = iter(predicted), 0, 0
    for label, skip in zip(labels, skipped, strict=True):
        is_predicted = label != IGNORE and next(predicted) == label
        if skip:
            continue
        current = current + 1 if is_predicted else 0
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
