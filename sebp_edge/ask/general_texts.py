"""Bundled general texts: those on which the base model teaches the adapter to predict as it does, and questions."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from sebp_edge.ask.wording import with_answers
from sebp_edge.lessons.examples import encode
from sebp_edge.values.documents import Document
from sebp_edge.values.example import NO_DOCUMENT, Example

FOLDER = Path(__file__).parent / "general"
_SEPARATOR = "\n<|text|>\n"


def general_examples(tokenizer, context_length: int, num_tokens: int, seed: int) -> list[Example]:
    """Returns examples of general text of about `num_tokens` tokens, drawn by the seed; again if there are too few."""
    if num_tokens <= 0:
        return []
    texts = (FOLDER / "texts.txt").read_text(encoding="utf-8").strip().split(_SEPARATOR)
    documents = [Document("", text) for text in random.Random(seed).sample(texts, len(texts))]
    examples = (each for document in documents for each in encode([document], tokenizer, context_length)[0])
    chosen, filled = [], 0
    for example in cycle(examples):
        if filled >= num_tokens:
            break
        chosen.append(Example(example.input_ids, example.labels, NO_DOCUMENT))
        filled += len(example.input_ids)
    return chosen


def chat_questions() -> list[str]:
    """Returns bundled general questions, which the base model answers."""
    return (FOLDER / "chat.txt").read_text(encoding="utf-8").splitlines()


def chat_examples(replies: Sequence[str], tokenizer, context_length: int) -> list[Example]:
    """Returns examples of the base model's replies to `chat_questions`."""
    pairs = zip(chat_questions(), replies, strict=True)
    documents = [Document("", with_answers([pair], tokenizer)) for pair in pairs if pair[1]]
    examples, _ = encode(documents, tokenizer, context_length, chat_template=bool(tokenizer.chat_template))
    return [replace(example, document=NO_DOCUMENT) for example in examples]


def general_questions() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields bundled general questions, each with its right answers."""
    for line in (FOLDER / "questions.txt").read_text(encoding="utf-8").splitlines():
        question, answers = line.split("|")
        yield question, tuple(answers.split("/"))
