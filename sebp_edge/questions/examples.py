"""Turns practice notes into examples: questions below passages that a search finds, as `ask` shows them."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import Passage
from sebp_edge.ask.terms import is_small
from sebp_edge.questions.answers import stands_in
from sebp_edge.questions.asking import shown, with_answers
from sebp_edge.questions.practice import practice_questions
from sebp_edge.texts.documents import Document, LeftOut
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.progress import SILENT, Progress

# How many passages stand before a question, and how many questions after them; one of each is drawn.
NUM_PASSAGES = (1, 1, 2, 3)
NUM_QUESTIONS = (1, 2, 3)
# The share of first questions that are asked in keywords, as people search.
KEYWORDS = 0.25

Turn = tuple[str, str]  # a question and its answer


def encode_practice(
    documents: list[Document],
    tokenizer,
    context_length: int,
    *,
    seed: int,
    chat_template: bool = True,
    common_lines: frozenset[str] = frozenset(),
    progress: Progress = SILENT,
) -> tuple[list[Example], list[LeftOut]]:
    """Encodes questions about practice notes; has the arguments and results of `texts.examples.encode`.

    Each wording of a question is in one example. Examples longer than the context are left out: cut, they would lack
    what is asked about. Without a chat template, each example has one question.

    Args:
        seed: draws what is asked together, and the passages.
    """
    index, draw, made = Index(documents), random.Random(seed), []
    with_turns = bool(tokenizer.chat_template)
    for number, document in enumerate(documents):
        for passages, turns in _conversations(document, index, draw, with_turns=with_turns):
            made.append((number, with_answers(turns, tokenizer, shown(passages))))
    conversations = [Document("", content) for _, content in made]
    options = {"chat_template": chat_template and with_turns, "progress": progress}
    examples, _ = encode(conversations, tokenizer, context_length, **options)
    pieces: dict[int, list[Example]] = {}
    for example in examples:
        pieces.setdefault(example.document, []).append(example)
    whole = [replace(found[0], document=made[at][0]) for at, found in pieces.items() if len(found) == 1]
    used = {example.document for example in whole}
    unused = [each for number, each in enumerate(documents) if number not in used]
    return whole, [LeftOut(each.source, "longer than the context") for each in unused]


def holding(answer: str, passages: Iterable[Passage]) -> list[Passage]:
    """Returns the passages that an answer stands in."""
    return [passage for passage in passages if stands_in(answer, passage.text)]


def _conversations(
    document: Document, index: Index, draw: random.Random, *, with_turns: bool
) -> Iterator[tuple[list[Passage], list[Turn]]]:
    """Yields passages, and questions about them with their answers, until each wording was asked."""
    turns = [(wording, each.answer) for each in practice_questions()[document.content] for wording in each.wordings]
    draw.shuffle(turns)
    while turns:
        number = draw.choice(NUM_QUESTIONS) if with_turns else 1
        (asked, answer), *others = turns[:number]
        turns = turns[number:]
        if draw.random() < KEYWORDS:
            asked = in_keywords(asked)
        passages = _passages(document, index, asked, answer, draw)
        own = [passage for passage in passages if passage.document == document.source]
        yield passages, [(asked, answer), *(turn for turn in others if holding(turn[1], own))]


def _passages(document: Document, index: Index, asked: str, answer: str, draw: random.Random) -> list[Passage]:
    """Returns a few of the passages that the search finds, one with the answer among them, in a drawn order."""
    number = draw.choice(NUM_PASSAGES)
    found = [hit.passage for hit in index.search(asked, number)]
    own = holding(answer, index.passages_of(document))
    if not set(own).intersection(found):
        found = [*found[: number - 1], own[0]]
    return draw.sample(found, len(found))


def in_keywords(question: str) -> str:
    """Returns a question without its small words and its question mark."""
    words = [word for word in question.rstrip("?？").split() if not is_small(word.casefold())]
    return " ".join(words) or question
