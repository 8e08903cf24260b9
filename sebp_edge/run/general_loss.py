"""Measures what an adaptation costs: the loss on a bundled probe of general text, with it and without it.

The base model's loss is kept in the cache folder, since it never changes.
"""

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from sebp_edge.basics.files import cache_folder, make_private, read_json, write_atomically
from sebp_edge.basics.stopping import Check
from sebp_edge.events import Sink
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.models.adaptation import Adaptation
from sebp_edge.models.loading import BaseModel, refuse_unknown_tokens
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.texts.general_probe import CONTEXT_LENGTH, MAX_RISE, encode_probe
from sebp_edge.training.scoring import score


@dataclass(frozen=True)
class GeneralLoss:
    """The loss on general text, in nats per token, of the base model and with an adaptation."""

    base: float
    adapted: float

    @property
    def rise(self) -> float:
        """By how much the adaptation raises the loss, relative to the base model's; negative if it lowers it."""
        return self.adapted / self.base - 1

    @property
    def is_high(self) -> bool:
        """Whether to warn: the loss rose by more than `MAX_RISE`, or is not a number."""
        return not self.rise <= MAX_RISE


def general_loss(
    base: BaseModel,
    adaptation: Adaptation,
    on_event: Sink,
    options: MemoryOptions = FASTEST,
    check: Check = lambda: None,
) -> GeneralLoss:
    """Returns the loss on the probe; computes the base model's only the first time.

    Args:
        adaptation: attached to `base`.
        on_event: receives the progress after each micro-batch; may raise to stop.
    """
    examples = _encode_probe(base)

    def loss() -> float:
        collator = Collator(CONTEXT_LENGTH, base.pad_token_id)
        return score(adaptation.model, examples, collator, base.device, on_event, options, check).mean

    key = _key(base, adaptation, examples)
    known = _read(key)
    if known is None:
        with adaptation.disabled():
            known = loss()
        _write(key, known)
    return GeneralLoss(known, loss())


def _encode_probe(base: BaseModel) -> list[Example]:
    examples = encode_probe(base.tokenizer, getattr(base.model.config, "max_position_embeddings", None))
    refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in examples))
    return examples


# -------------------------------------------------------------------------------------------------------------- cache


def _key(base: BaseModel, adaptation: Adaptation, examples: list[Example]) -> dict[str, str]:
    """What the base model's loss depends on: weights, precision, and the probe's tokens."""
    tokens = json.dumps([[example.input_ids.tolist(), example.labels.tolist()] for example in examples])
    return {
        "model": base.fingerprint,
        "dtype": "nf4" if base.in_4bit else adaptation.merge_for or str(base.dtype),
        "probe": hashlib.sha256(tokens.encode()).hexdigest(),
    }


def _file(key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_folder() / f"general-loss-{digest[:12]}.json"


def _read(key: dict[str, str]) -> float | None:
    """Returns the known loss; None if there is none, or if its file is damaged."""
    try:
        values = read_json(_file(key))
    except (OSError, ValueError):
        return None
    loss = values.pop("loss", None)
    return loss if values == key and type(loss) is float and math.isfinite(loss) else None


def _write(key: dict[str, str], loss: float) -> None:
    """Keeps a loss; a disk that refuses it costs only time."""
    with suppress(OSError):
        make_private(cache_folder())
        write_atomically(_file(key), json.dumps({**key, "loss": loss}))
