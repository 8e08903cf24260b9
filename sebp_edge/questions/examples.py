"""Turns questions about documents into examples to train on, and into a quiz.

Each question has wordings that are trained on, one that chooses the best epoch, and one that is in the quiz.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sebp_edge.errors import TextsError
from sebp_edge.questions.asking import prompt_for, with_answer
from sebp_edge.questions.general_texts import general_examples
from sebp_edge.questions.question import Question
from sebp_edge.questions.rules import ask
from sebp_edge.recipe import Recipe
from sebp_edge.texts.dataset import Asked, Dataset, QuizQuestion
from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.progress import Progress
from sebp_edge.texts.readers import Reading

# Questions in the quiz, and wordings that choose the best epoch: enough to tell a gain, few enough to ask on a CPU.
QUIZ_SIZE = 60
# The quiz cannot tell a gain from chance below this.
MIN_QUESTIONS = 6
# Wordings of each question that are also trained on after the document, so that reading does not get worse.
READ_WORDINGS = 2
# Room for the reply to a question in the quiz.
REPLY_TOKENS = 32


@dataclass(frozen=True)
class _Asked:
    """A question about the document of a number."""

    document: int
    text: str
    question: Question


def add_questions(
    dataset: Dataset, reading: Reading, tokenizer, recipe: Recipe, seed: int, progress: Progress | None = None
) -> Dataset:
    """Returns the dataset with examples of questions about its documents; all documents are then trained on.

    Args:
        dataset: the examples of the documents themselves.
        tokenizer: the base model's tokenizer. Without a chat template, questions are asked in a plain format.
        seed: draws the quiz.
        progress: of the preparation.

    Raises:
        TextsError: there are too few questions.
    """
    progress = progress or Progress()
    contents = {example.document: reading.documents[example.document].content for example in dataset.examples}
    # Records are questions with answers, or conversations, themselves.
    texts = {number: content for number, content in contents.items() if isinstance(content, str)}
    progress.begin("asking", sum(map(len, texts.values())))
    asked = []
    for number, text in texts.items():
        asked += [_Asked(number, text, question) for question in ask(text, reading.documents[number].name)]
        progress.advance(len(text))
    progress.end()
    without = sorted(texts.keys() - {each.document for each in asked})
    sources = tuple(reading.documents[number].source for number in without)
    return _with_examples(dataset, asked, sources, tokenizer, recipe, seed)


def _with_examples(
    dataset: Dataset, asked: list[_Asked], without: tuple[str, ...], tokenizer, recipe: Recipe, seed: int
) -> Dataset:
    quiz = list(_askable(_ordered(asked, seed), tokenizer, dataset.context_length))[:QUIZ_SIZE]
    if len(quiz) < MIN_QUESTIONS:
        raise TextsError(
            f"Only {len(quiz)} questions could be made of these documents, but the recipe {recipe.name!r} needs at "
            f"least {MIN_QUESTIONS}; give documents with facts, such as names, dates and amounts, or use the recipe "
            "'notes'."
        )
    length = dataset.context_length
    trained = _encode(_trained(asked), tokenizer, length)
    num_tokens = sum(len(example.input_ids) for example in trained)
    made = Asked(
        trained=trained,
        general=general_examples(tokenizer, length, round(recipe.general * num_tokens), seed),
        validation=_encode([(one, one.question.kept_out[0], None) for one, _ in quiz], tokenizer, length),
        test=_encode([(one, one.question.kept_out[1], None) for one, _ in quiz], tokenizer, length),
        quiz=tuple(question for _, question in quiz),
        num_questions=len(asked),
        without=without,
    )
    draw = replace(dataset.draw, split_of={}, fold_of={}, history=dataset.draw.history.all_trained_on())
    return replace(dataset, draw=draw, concerns=(), is_chat=bool(tokenizer.chat_template), asked=made)


def _ordered(asked: list[_Asked], seed: int) -> list[_Asked]:
    """Returns the questions in a random order in which those about different documents come first."""
    seen, keys = Counter(), []
    for each in random.Random(seed).sample(asked, len(asked)):
        seen[each.document] += 1
        keys.append((seen[each.document], each))
    return [each for _, each in sorted(keys, key=lambda key: key[0])]


def _askable(asked: Iterable[_Asked], tokenizer, context_length: int) -> Iterator[tuple[_Asked, QuizQuestion]]:
    """Yields the questions that the quiz can ask: those with enough wordings, whose tokens are no control tokens."""
    for each in asked:
        if len(each.question.kept_out) < 2:
            continue
        wording = each.question.kept_out[1]
        alone, after = _prompt(wording, tokenizer), _prompt(wording, tokenizer, each.text)
        if alone is None:
            continue
        if after is not None and len(after) + REPLY_TOKENS > context_length:
            after = None
        yield each, QuizQuestion(each.document, wording, each.question.answer, alone, after)


def _prompt(wording: str, tokenizer, document: str | None = None) -> tuple[int, ...] | None:
    """Returns the tokens of a question; None if the text contains a control token of the model."""
    try:
        return tuple(prompt_for(wording, tokenizer, document).input_ids)
    except TextsError:
        return None


def _trained(asked: list[_Asked]) -> Iterable[tuple[_Asked, str, str | None]]:
    """Yields each wording alone, and some after their document."""
    for each in asked:
        for position, wording in enumerate(each.question.wordings):
            yield each, wording, None
            if position < READ_WORDINGS:
                yield each, wording, each.text


def _encode(wordings: Iterable[tuple[_Asked, str, str | None]], tokenizer, context_length: int) -> list[Example]:
    """Returns the examples of wordings with their answers, numbered as their documents are.

    Wordings after a document that is longer than the context are left out: cut, they would lack what is asked about.
    """
    wordings = list(wordings)
    documents = [
        Document("", with_answer(wording, each.question.answer, tokenizer, text)) for each, wording, text in wordings
    ]
    examples, _ = encode(documents, tokenizer, context_length, chat_template=True)
    pieces = {}
    for example in examples:
        pieces.setdefault(example.document, []).append(example)
    return [
        replace(found[0], document=wordings[number][0].document) for number, found in pieces.items() if len(found) == 1
    ]
