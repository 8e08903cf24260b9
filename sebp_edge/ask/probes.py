"""Probes of what a model could before a training: general text, and endings that fit one of two beginnings.

Two neighbours in a file are an item: each is a right text, and a wrong one with the ending of the other. A model knows
the item if the right two are likelier, together, than the wrong two. Since these have the same endings, it does not
matter how likely it holds an ending by itself, and it knows half of the items by guessing.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from sebp_edge.ask.general_texts import FOLDER, general_questions
from sebp_edge.ask.wording import with_answers
from sebp_edge.lessons.general_probe import encode_probe, read_probe
from sebp_edge.values.dataset import Probes
from sebp_edge.values.documents import Content

LANGUAGE = FOLDER / "language.txt"
# The most items of a probe. Losing six of them, and gaining none, is more than chance.
MAX_ITEMS = 40
_SENTENCE = re.compile(r"(.*)\[(.+)\|(.+)\](.*)")

Item = tuple[Content, Content, Content, Content]  # a right text, a wrong one, and the same of its neighbour


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
