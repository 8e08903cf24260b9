"""Examples of general text, on which the base model teaches the adapter to predict as it does itself."""

import random
from itertools import cycle
from pathlib import Path

from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import NO_DOCUMENT, Example, encode

TEXTS = Path(__file__).parent / "general" / "texts.txt"
_SEPARATOR = "\n<|text|>\n"
# Every so many texts one is held out; its share of all text is enough to tell a rise of one percent.
_HELD_OUT_EVERY = 40


def general_examples(tokenizer, context_length: int, num_tokens: int, seed: int) -> list[Example]:
    """Returns examples of general text of about `num_tokens` tokens, drawn by the seed; again if there are too few."""
    if num_tokens <= 0:
        return []
    texts = [text for number, text in enumerate(_read()) if number % _HELD_OUT_EVERY]
    chosen, filled = [], 0
    for example in cycle(_encoded(random.Random(seed).sample(texts, len(texts)), tokenizer, context_length)):
        if filled >= num_tokens:
            break
        chosen.append(example)
        filled += len(example.input_ids)
    return chosen


def held_out_examples(tokenizer, context_length: int) -> list[Example]:
    """Returns examples of the general text that is never trained on."""
    return _encoded(_read()[::_HELD_OUT_EVERY], tokenizer, context_length)


def _read() -> list[str]:
    return TEXTS.read_text(encoding="utf-8").strip().split(_SEPARATOR)


def _encoded(texts: list[str], tokenizer, context_length: int) -> list[Example]:
    examples, _ = encode([Document("", text) for text in texts], tokenizer, context_length)
    return [Example(example.input_ids, example.labels, NO_DOCUMENT) for example in examples]
