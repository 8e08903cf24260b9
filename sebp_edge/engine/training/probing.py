"""Measures what an adaptation costs by probes: general text, language and facts, with it and without it.

A pass over all of them takes as long as one over 20,000 tokens at most. What the base model does is kept in the cache
folder, since it never changes.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from sebp_edge.basics.files import keep, read_kept
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation
from sebp_edge.engine.models.loading import BaseModel, refuse_unknown_tokens
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.scoring import scoring
from sebp_edge.events import Sink
from sebp_edge.values.dataset import Probes
from sebp_edge.values.example import Example
from sebp_edge.values.probe_figures import ProbeFigures

# A model knows an item only if it prefers what is right by more nats: so many are due to rounding.
TIE = 0.01

Losses = dict[int, float]  # nats by the number of a text


@dataclass(frozen=True)
class Probed:
    """What the probes show of an adaptation; see `TrainingFigures`."""

    general_loss_before: float
    general_loss_after: float
    language: ProbeFigures | None = None
    facts: ProbeFigures | None = None


def probe(
    base: BaseModel,
    adaptation: Adaptation,
    probes: Probes,
    on_event: Sink,
    options: MemoryOptions = FASTEST,
    check: Check = lambda: None,
) -> Probed:
    """Scores the probes; computes the base model's losses only the first time.

    Args:
        adaptation: attached to `base`.
        on_event: receives the progress after each micro-batch; may raise to stop.
    """
    examples, first = probes.examples, probes.num_general
    refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in examples))
    key, collator = _key(base, examples), Collator(None, base.pad_token_id)
    known = read_kept("probes", key)
    before = None if known is None else dict(known)
    with scoring(adaptation.model, examples, collator, base.device, on_event, options, check) as losses:
        if before is None:
            with adaptation.without_effect():
                before = losses().nats
            keep("probes", key, sorted(before.items()))
        after = losses().nats
    tokens = sum(example.num_loss_tokens for example in examples if example.document < first)
    facts_begin = first + 4 * probes.num_language
    return Probed(
        general_loss_before=sum(loss for number, loss in before.items() if number < first) / tokens,
        general_loss_after=sum(loss for number, loss in after.items() if number < first) / tokens,
        language=_compare(before, after, range(first, facts_begin, 4)),
        facts=_compare(before, after, range(facts_begin, facts_begin + 4 * probes.num_facts, 4)),
    )


def _compare(before: Losses, after: Losses, items: Iterable[int]) -> ProbeFigures | None:
    """Compares two models on items, given by the numbers of their first texts."""
    whole = [number for number in items if before.keys() >= {*range(number, number + 4)}]
    return ProbeFigures.of(*([_is_known(part, number) for number in whole] for part in (before, after)))


def _is_known(losses: Losses, number: int) -> bool:
    right, wrong, other_right, other_wrong = (losses[number + place] for place in range(4))
    return right + other_right + TIE < wrong + other_wrong


# -------------------------------------------------------------------------------------------------------------- cache


def _key(base: BaseModel, examples: list[Example]) -> dict[str, str]:
    """What the base model's losses depend on: weights, precision, and the probes' tokens."""
    tokens = json.dumps([[each.document, each.input_ids.tolist(), each.labels.tolist()] for each in examples])
    return {
        "model": base.fingerprint,
        "dtype": base.precision,
        "probe": hashlib.sha256(tokens.encode()).hexdigest(),
    }
