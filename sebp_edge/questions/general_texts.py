"""Examples of general text, on which the base model teaches the adapter to predict as it does itself."""

import random
from itertools import cycle
from pathlib import Path

from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import NO_DOCUMENT, Example, encode

TEXTS = Path(__file__).parent / "general" / "texts.txt"
_SEPARATOR = "\n<|text|>\n"


def general_examples(tokenizer, context_length: int, num_tokens: int, seed: int) -> list[Example]:
    """Returns examples of general text of about `num_tokens` tokens, drawn by the seed; again if there are too few."""
    if num_tokens <= 0:
        return []
    texts = TEXTS.read_text(encoding="utf-8").strip().split(_SEPARATOR)
    documents = [Document("", text) for text in random.Random(seed).sample(texts, len(texts))]
    examples, _ = encode(documents, tokenizer, context_length)
    chosen, filled = [], 0
    for example in cycle(examples):
        if filled >= num_tokens:
            break
        chosen.append(Example(example.input_ids, example.labels, NO_DOCUMENT))
        filled += len(example.input_ids)
    return chosen
