"""Bundled general texts, on which the base model teaches the adapter to predict as it does; questions and probes.

Probes tell what a model could before a training: endings that fit one of two beginnings. Two neighbours in a file are
an item: each is a right text, and a wrong one with the ending of the other. A model knows the item if the right two are
likelier, together, than the wrong two. Since these have the same endings, it does not matter how likely it holds an
ending by itself, and it knows half of the items by guessing.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path

from sebp_edge.ask.wording import with_answers
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.general_probe import encode_probe, read_probe
from sebp_edge.values.dataset import Probes
from sebp_edge.values.documents import Content, Document
from sebp_edge.values.example import NO_DOCUMENT, Example

FOLDER = Path(__file__).parent / "general"
LANGUAGE = FOLDER / "language.txt"
_SEPARATOR = "\n<|text|>\n"
# The least tokens of an example.
MIN_TOKENS = 8
# Room for the base model's reply to a general question.
CHAT_TOKENS = 48
# The most items of a probe. Losing six of them, and gaining none, is more than chance.
MAX_ITEMS = 40
_SENTENCE = re.compile(r"(.*)\[(.+)\|(.+)\](.*)")

Item = tuple[Content, Content, Content, Content]  # a right text, a wrong one, and the same of its neighbour


def general_examples(tokenizer, context_length: int, num_tokens: int, seed: int) -> list[Example]:
    """Returns examples of general text of about `num_tokens` tokens, drawn by the seed; again if there are too few."""
    if num_tokens <= 0:
        return []
    # Of few tokens, short examples are more than one, and exceed their number by little.
    context_length = min(context_length, max(MIN_TOKENS, num_tokens // 4))
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


def chat_questions(num_tokens: int) -> list[str]:
    """Returns bundled general questions of all kinds, as many as have replies of up to `num_tokens` tokens."""
    questions = (FOLDER / "chat.txt").read_text(encoding="utf-8").splitlines()
    number = min(num_tokens // CHAT_TOKENS, len(questions))
    return [questions[place * len(questions) // number] for place in range(number)]


def chat_examples(questions: Sequence[str], replies: Sequence[str], tokenizer, context_length: int) -> list[Example]:
    """Returns examples of the base model's replies to questions."""
    pairs = zip(questions, replies, strict=True)
    documents = [Document("", with_answers([pair], tokenizer)) for pair in pairs if pair[1]]
    examples, _ = encode(documents, tokenizer, context_length, chat_template=bool(tokenizer.chat_template))
    return [replace(example, document=NO_DOCUMENT) for example in examples]


def general_questions() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields bundled general questions, each with its right answers."""
    for line in (FOLDER / "questions.txt").read_text(encoding="utf-8").splitlines():
        question, answers = line.split("|")
        yield question, tuple(answers.split("/"))


def encode_probes(tokenizer, limit: int | None) -> Probes:
    """Returns the bundled probes as examples of at most `limit` tokens."""
    language, facts = list(language_items()), list(fact_items(tokenizer))
    examples = encode_probe(tokenizer, limit, chain.from_iterable(language + facts))
    return Probes(examples, len(read_probe()), len(language), len(facts))


def language_items() -> Iterator[Item]:
    """Yields sentences beside the same with a mistake."""
    for sentences in _neighbours(LANGUAGE.read_text(encoding="utf-8").splitlines()):
        parts = [_SENTENCE.fullmatch(sentence).groups() for sentence in sentences]
        yield tuple(f"{begin}{ending}{end}" for begin, *endings, end in parts for ending in endings)


def fact_items(tokenizer) -> Iterator[Item]:
    """Yields general questions as a user asks them, with their answers beside their neighbours'."""
    for (question, (answer, *_)), (other, (wrong, *_)) in _neighbours(general_questions()):
        asked = ((question, answer), (question, wrong), (other, wrong), (other, answer))
        yield tuple(with_answers([each], tokenizer) for each in asked)


def _neighbours(lines: Iterable) -> Iterator[tuple]:
    lines = iter(lines)
    return islice(zip(lines, lines, strict=False), MAX_ITEMS)
