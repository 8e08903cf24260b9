"""Turns practice notes into examples: questions below the passage that answers them, as `ask` shows it."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

from sebp_edge.ask.passages import Passage, passages_of
from sebp_edge.ask.practice import practice_questions
from sebp_edge.ask.wording import shown, with_answers
from sebp_edge.lessons.examples import encode
from sebp_edge.values.answers import stands_in
from sebp_edge.values.documents import Document, LeftOut
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import SILENT, Progress

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
    """Encodes questions about practice notes; has the arguments and results of `lessons.examples.encode`.

    All questions about a passage are the turns of one conversation; each of their wordings is in one. Without a chat
    template, each question is an example. Those longer than the context are left out: cut, they would lack what is
    asked about.

    Args:
        seed: draws the order of the questions.
    """
    draw, numbers, conversations = random.Random(seed), [], []
    has_turns = bool(tokenizer.chat_template)
    for number, document in enumerate(documents):
        for passage, turns in _conversations(document, draw):
            for some in [turns] if has_turns else [[turn] for turn in turns]:
                numbers.append(number)
                conversations.append(Document("", with_answers(some, tokenizer, shown([passage]))))
    options = {"chat_template": chat_template and has_turns, "progress": progress}
    # None is cut here: a part of a conversation may lack the passage.
    examples, _ = encode(conversations, tokenizer, sys.maxsize, **options)
    whole = [
        replace(example, document=numbers[example.document])
        for example in examples
        if example.num_tokens <= context_length
    ]
    used = {example.document for example in whole}
    unused = [each for number, each in enumerate(documents) if number not in used]
    return whole, [LeftOut(each.source, "longer than the context") for each in unused]


def _conversations(document: Document, draw: random.Random) -> Iterator[tuple[Passage, list[Turn]]]:
    """Yields each passage of a note with the questions that it answers, once for each of their wordings."""
    questions = practice_questions()[document.content]
    for number in range(max(len(each.wordings) for each in questions)):
        turns = [(each.wordings[number % len(each.wordings)], each.answer) for each in questions]
        for passage in passages_of(document):
            answered = [turn for turn in turns if stands_in(turn[1], passage.text)]
            if answered:
                yield passage, draw.sample(answered, len(answered))
