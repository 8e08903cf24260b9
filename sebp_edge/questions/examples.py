"""Turns questions about documents into examples to train on, and into a quiz.

The quiz asks in sentences what is trained on in keywords only: whoever learnt the trained words by heart fails it.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from sebp_edge.errors import TextsError
from sebp_edge.questions.asking import prompt_for, with_answers
from sebp_edge.questions.cues import ask_by_cues
from sebp_edge.questions.general_texts import general_examples
from sebp_edge.questions.practice import practice_notes
from sebp_edge.questions.question import Question
from sebp_edge.questions.rules import ask
from sebp_edge.recipe import Recipe
from sebp_edge.texts.conversations import refuse_unusable_template
from sebp_edge.texts.dataset import Dataset, QuestionSet, QuizQuestion
from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import NO_DOCUMENT, TURNS, Example, encode
from sebp_edge.texts.general_probe import encode_probe
from sebp_edge.texts.progress import SILENT, Progress
from sebp_edge.texts.readers import Reading

# Questions in the quiz, and wordings that choose the best epoch: enough to tell a gain, few enough to ask on a CPU.
QUIZ_SIZE = 60
# The quiz cannot tell a gain from chance below this.
MIN_QUESTIONS = 6
# At most so large a part of the questions is asked in the quiz, since their sentences are not trained on.
QUIZ_SHARE = 0.25
# Questions of a conversation that begins with the document, so that reading does not get worse.
READ_TOGETHER = 4
# Wordings of a question that a turn trains on, and those in sentences of one that is trained on in keywords, too.
MAX_WORDINGS = 6
MAX_BESIDE_KEYWORDS = 2
# Room for the reply to a question in the quiz.
REPLY_TOKENS = 32


@dataclass(frozen=True)
class _Item:
    """A question about the document of a number, or about a practice note.

    Attributes:
        in_keywords: whether another question asks for the same answer in keywords.
    """

    document: int
    text: str
    question: Question
    in_keywords: bool = False

    def wordings_of(self, turn: int, held_out: Container[str]) -> tuple[str, ...]:
        """Returns the wordings that a turn trains on; all if there are too few to take turns."""
        own = tuple(wording for wording in self.question.wordings if wording not in held_out)
        most = MAX_BESIDE_KEYWORDS if self.in_keywords else MAX_WORDINGS
        return (own[turn::TURNS] or own)[:most]


@dataclass(frozen=True)
class _Quizzed:
    """A question of the quiz.

    Attributes:
        validated: the wording that chooses the best epoch.
        tested: the wording that is asked in the quiz.
        held_out: the wordings that are not trained on, whichever document they are about.
    """

    asked: _Item
    validated: str
    tested: str
    held_out: tuple[str, ...]


def add_questions(
    dataset: Dataset,
    reading: Reading,
    tokenizer,
    recipe: Recipe,
    seed: int,
    progress: Progress = SILENT,
) -> Dataset:
    """Returns the dataset with examples of questions about its documents; all documents are then trained on.

    Args:
        dataset: the examples of the documents themselves.
        tokenizer: the base model's tokenizer. Without a chat template, questions are asked in a plain format.
        seed: draws the quiz.
        progress: of the preparation.

    Raises:
        TextsError: there are too few questions, or only records.
        ModelError: the model's chat template does not render questions.
    """
    contents = {example.document: reading.documents[example.document].content for example in dataset.examples}
    # Records are questions with answers, or conversations, themselves.
    texts = {number: content for number, content in contents.items() if isinstance(content, str)}
    if not texts:
        raise TextsError(
            "These documents are questions with answers or conversations already; use the recipe 'instruct' or 'chat'."
        )
    progress.begin("asking", sum(map(len, texts.values())))
    asked, in_keywords = [], []
    for number, text in texts.items():
        name = reading.documents[number].name
        cues = ask_by_cues(text, name)
        answers = {cue.answer.casefold() for cue in cues}
        in_keywords += [_Item(number, text, cue) for cue in cues]
        asked += [_Item(number, text, question, question.answer.casefold() in answers) for question in ask(text, name)]
        progress.advance(len(text))
    progress.end()
    without = sorted(texts.keys() - {each.document for each in [*asked, *in_keywords]})
    sources = tuple(reading.documents[number].source for number in without)
    return _with_examples(dataset, asked, in_keywords, sources, tokenizer, recipe, seed)


def _with_examples(
    dataset: Dataset,
    asked: list[_Item],
    in_keywords: list[_Item],
    without: tuple[str, ...],
    tokenizer,
    recipe: Recipe,
    seed: int,
) -> Dataset:
    size = min(QUIZ_SIZE, max(MIN_QUESTIONS, round(QUIZ_SHARE * len(asked))))
    length = dataset.context_length
    quiz = _draw(asked, tokenizer, length, seed)[:size]
    if len(quiz) < MIN_QUESTIONS:
        refuse_unusable_template(tokenizer)
        raise TextsError(
            f"Only {len(quiz)} questions could be made of these documents, but the recipe {recipe.name!r} needs at "
            f"least {MIN_QUESTIONS}; give documents with facts, such as names, dates and amounts, or use the recipe "
            "'notes'."
        )
    # Notes that are alike ask the same.
    held_out = {wording for each in quiz for wording in each.held_out}
    trained = _trained([*asked, *in_keywords], held_out, tokenizer, length, seed)
    num_notes = len({each.document for each in in_keywords})
    practice = _trained(_practice(num_notes, seed), held_out, tokenizer, length, seed)
    num_tokens = sum(len(example.input_ids) for example in [*trained, *practice]) / TURNS
    made = QuestionSet(
        trained=trained,
        practice=practice,
        general=general_examples(tokenizer, length, round(recipe.general * num_tokens), seed),
        probe=encode_probe(tokenizer, length) if recipe.general else [],
        validation=_encode((_one(each.asked, each.validated) for each in quiz), tokenizer, length),
        test=_encode((_one(each.asked, each.tested) for each in quiz), tokenizer, length),
        quiz=tuple(_quiz_question(each, tokenizer, length) for each in quiz),
        num_questions=len(asked) + len(in_keywords),
        without=without,
    )
    draw = replace(dataset.draw, split_of={}, fold_of={}, history=dataset.draw.history.all_trained_on())
    return replace(dataset, draw=draw, concerns=(), is_chat=bool(tokenizer.chat_template), questions=made)


def _practice(num_notes: int, seed: int) -> list[_Item]:
    """Returns questions about so many practice notes, or about all: in a person's words and in keywords."""
    bundled = practice_notes()
    notes = random.Random(seed).sample(bundled, min(num_notes, len(bundled)))
    return [
        _Item(NO_DOCUMENT, note.text, question) for note in notes for question in [*note.questions, *note.in_keywords()]
    ]


def _trained(asked: list[_Item], held_out: Container[str], tokenizer, context_length: int, seed: int) -> list[Example]:
    """Returns the examples of all turns, each question also after its document in one of them."""
    examples = []
    for turn in range(TURNS):
        wordings = [(each, each.wordings_of(turn, held_out)) for each in asked]
        conversations = chain(_alone(wordings), _after_documents(wordings[turn::TURNS], tokenizer, seed))
        examples += [replace(example, turn=turn) for example in _encode(conversations, tokenizer, context_length)]
    return examples


def _draw(asked: list[_Item], tokenizer, context_length: int, seed: int) -> list[_Quizzed]:
    """Draws the questions of the quiz: first those that are trained on in keywords, about different documents."""
    seen, ranked, drawn = Counter(), [], set()
    for each in random.Random(seed).sample(asked, len(asked)):
        quizzed = _quizzed(each)
        if quizzed is None or quizzed.tested in drawn:
            continue
        prompt = _prompt(quizzed.tested, tokenizer)
        if prompt is None or len(prompt) + REPLY_TOKENS > context_length:
            continue
        drawn.add(quizzed.tested)
        seen[each.document] += 1
        ranked.append((not each.in_keywords, seen[each.document], quizzed))
    return [quizzed for *_, quizzed in sorted(ranked, key=lambda key: key[:2])]


def _quizzed(asked: _Item) -> _Quizzed | None:
    """Returns the question as the quiz asks it; None if it has too few wordings."""
    question = asked.question
    if asked.in_keywords and len(question.wordings) >= 2:
        return _Quizzed(asked, question.wordings[1], question.wordings[0], question.wordings)
    if len(question.kept_out) >= 2:
        return _Quizzed(asked, *question.kept_out[:2], question.kept_out)
    return None


def _quiz_question(quizzed: _Quizzed, tokenizer, context_length: int) -> QuizQuestion:
    asked, wording = quizzed.asked, quizzed.tested
    after = _prompt(wording, tokenizer, asked.text)
    if after is not None and len(after) + REPLY_TOKENS > context_length:
        after = None
    return QuizQuestion(asked.document, wording, asked.question.answer, _prompt(wording, tokenizer), after)


def _prompt(wording: str, tokenizer, document: str | None = None) -> tuple[int, ...] | None:
    """Returns the tokens of a question; None if the text contains a control token of the model."""
    try:
        return tuple(prompt_for(wording, tokenizer, document).input_ids)
    except TextsError:
        return None


_Conversation = tuple[_Item, list[tuple[str, str]], str | None]


def _one(asked: _Item, wording: str) -> _Conversation:
    return asked, [(wording, asked.question.answer)], None


def _alone(wordings: list[tuple[_Item, tuple[str, ...]]]) -> Iterator[_Conversation]:
    """Yields each wording by itself."""
    for asked, own in wordings:
        yield from (_one(asked, wording) for wording in own)


def _after_documents(wordings: list[tuple[_Item, tuple[str, ...]]], tokenizer, seed: int) -> Iterator[_Conversation]:
    """Yields one wording of each question after its document, a few in each conversation.

    In the plain format only the last answer of a conversation has loss, so each is one by itself.
    """
    draw, of_document = random.Random(seed), defaultdict(list)
    for asked, own in wordings:
        if own:
            of_document[asked.document, asked.text].append((asked, (draw.choice(own), asked.question.answer)))
    size = READ_TOGETHER if tokenizer.chat_template else 1
    for found in of_document.values():
        draw.shuffle(found)
        for begin in range(0, len(found), size):
            some = found[begin : begin + size]
            yield some[0][0], [pair for _, pair in some], some[0][0].text


def _encode(conversations: Iterable[_Conversation], tokenizer, context_length: int) -> list[Example]:
    """Returns the examples of conversations, numbered as their documents are.

    Those that are longer than the context are left out: cut, they would lack what is asked about.
    """
    conversations = list(conversations)
    documents = [Document("", with_answers(pairs, tokenizer, text)) for _, pairs, text in conversations]
    examples, _ = encode(documents, tokenizer, context_length, chat_template=bool(tokenizer.chat_template))
    pieces = defaultdict(list)
    for example in examples:
        pieces[example.document].append(example)
    return [
        replace(found[0], document=conversations[number][0].document)
        for number, found in pieces.items()
        if len(found) == 1
    ]
