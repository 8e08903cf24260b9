"""Makes the dataset of a user's texts: its examples, their splits, and what was left out."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import NamedTuple

from sebp_edge.recipe import Recipe
from sebp_edge.texts.boilerplate import common_lines
from sebp_edge.texts.concerns import find_concerns
from sebp_edge.texts.documents import LeftOut
from sebp_edge.texts.examples import Example, Outline, encode
from sebp_edge.texts.progress import SILENT, Progress
from sebp_edge.texts.readers import Reading
from sebp_edge.texts.split_history import SplitHistory, take_fingerprints
from sebp_edge.texts.splits import MIN_CLUSTERS, Draw, Split, draw_splits

_TOO_FEW = (
    f"The gate needs at least {MIN_CLUSTERS} documents that are not copies of each other to judge an adapter; give "
    "more documents."
)


@dataclass(frozen=True)
class Drawing:
    """What the splits of documents are drawn from.

    Attributes:
        seed: decides about new documents.
        earlier: the documents of earlier versions of the adapter, which keep their splits, and the salt.
    """

    seed: int
    earlier: SplitHistory = field(default_factory=SplitHistory)


@dataclass(frozen=True)
class QuizQuestion:
    """A question about a document, in a wording that is not trained on.

    Attributes:
        document: the number of the document.
        question, answer: their texts, which are the user's.
        alone: the prompt's tokens without the document.
        with_document: the prompt's tokens with the document before the question; None if it is too long.
    """

    document: int
    question: str
    answer: str
    alone: tuple[int, ...]
    with_document: tuple[int, ...] | None


@dataclass(frozen=True)
class QuestionSet:
    """Examples made of questions about the documents. Wordings are held out, so all documents are trained on.

    Attributes:
        trained: questions with their answers, alone and after their documents.
        practice: questions about bundled notes, in a person's words, too (see `questions.practice`).
        general: examples that keep what the model could do before, with the base model as the teacher.
        probe: other general text, that tells how much was forgotten; none if the recipe has no general text.
        validation: answers to wordings that choose the best epoch.
        test: answers to the quiz's wordings.
        quiz: the questions that the model is asked before and after the training.
        num_questions: the number of different questions.
        without: the sources of documents about which no question could be made.
    """

    trained: list[Example]
    practice: list[Example]
    general: list[Example]
    probe: list[Example]
    validation: list[Example]
    test: list[Example]
    quiz: tuple[QuizQuestion, ...]
    num_questions: int
    without: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What was made of the documents, and about how many nothing could be asked, without text."""
        made = f"{self.num_questions:,} questions were made of the documents, in {len(self.trained):,} examples."
        if not self.without:
            return made
        return (
            f"{made} About {len(self.without):,} of the documents none could be made: no facts were recognised in them."
        )


class Outlines(NamedTuple):
    """The outlines of a dataset's examples, by what they are for."""

    trained: list[Outline]
    validation: list[Outline]
    test: list[Outline]
    probe: list[Outline]


@dataclass(frozen=True)
class Dataset:
    """Examples of at most `context_length` tokens.

    Splits, schedules and evaluations have their outlines; `all_examples` has the tokens.

    Attributes:
        num_documents: the number of documents that the examples come from.
        left_out: what was not used, and why.
        draw: the split of each document, and what it is recognised by.
        concerns: what makes a gain on these texts meaningless, a sentence each.
        is_chat: whether the chat template rendered more than half of these documents.
        names: the names of documents that have one.
        questions: what was made of questions about the documents; None if the recipe asks none.
    """

    examples: list[Example]
    context_length: int
    num_documents: int
    left_out: list[LeftOut]
    draw: Draw
    concerns: tuple[str, ...] = ()
    is_chat: bool = False
    names: dict[int, str] = field(default_factory=dict)
    questions: QuestionSet | None = None

    @property
    def unjudged_because(self) -> tuple[str, ...]:
        """Why the gate will judge nothing, a sentence each; empty if it will."""
        if self.questions is None and self.draw.kind == "none":
            return (*self.concerns, _TOO_FEW)
        return self.concerns

    @property
    def trained(self) -> list[Example]:
        """All examples that a training on all documents uses."""
        if self.questions is None:
            return self.examples
        return self.examples + self.questions.trained + self.questions.practice + self.questions.general

    @property
    def all_examples(self) -> list[Example]:
        """All examples, by the numbers of their outlines."""
        return list(chain.from_iterable(self._parts))

    @cached_property
    def outlines(self) -> Outlines:
        """What the tokens are not needed for is done with these."""
        numbers = count()
        return Outlines(*([example.outline(next(numbers)) for example in part] for part in self._parts))

    @property
    def _parts(self) -> tuple[list[Example], ...]:
        asked = self.questions
        return self.trained, *((asked.validation, asked.test, asked.probe) if asked else ([], [], []))

    def splits(self) -> list[Split]:
        """Returns one split, three folds, or nothing if nothing can be judged (see `Draw.splits`)."""
        if self.questions is not None:
            return [Split(*self.outlines[:3])]
        return self.draw.splits(self.outlines.trained)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples, without padding."""
        return sum(example.num_tokens for example in self.examples)

    @property
    def padding_share(self) -> float:
        """The share of padding if all examples are padded to the context length."""
        return 1 - self.num_tokens / max(1, len(self.examples) * self.context_length)


def make_dataset(
    reading: Reading,
    tokenizer,
    recipe: Recipe,
    model_limit: int | None,
    drawing: Drawing,
    progress: Progress = SILENT,
) -> Dataset:
    """Encodes documents as examples and draws their splits.

    Args:
        recipe: sets the context length and whether to use the chat template.
        model_limit: the maximum sequence length that the model supports; None if it has no limit.

    Raises:
        ModelError: see `encode`.
    """
    context_length = min(recipe.context_length, model_limit or recipe.context_length)
    texts = {number: document.own_text for number, document in enumerate(reading.documents)}
    fingerprints = take_fingerprints(texts, drawing.earlier.salt, progress)
    draw = draw_splits(fingerprints, drawing.seed, drawing.earlier)
    lines = common_lines(texts, draw.cluster_of)
    examples, left_out = encode(
        reading.documents,
        tokenizer,
        context_length,
        chat_template=recipe.chat_template,
        common_lines=lines,
        progress=progress,
    )
    used = sorted({example.document for example in examples})
    if len(used) < len(texts):
        fingerprints = {number: fingerprints[number] for number in fingerprints if number in set(used)}
        draw = draw_splits(fingerprints, drawing.seed, drawing.earlier)
    chats = {example.document for example in examples if example.is_chat}
    return Dataset(
        examples,
        context_length,
        len(used),
        reading.left_out + left_out,
        draw,
        find_concerns([texts[number] for number in used], draw.cluster_of, reading.num_equal, tokenizer),
        is_chat=2 * len(chats) > len(used),
        names={number: name for number in used if (name := reading.documents[number].name) is not None},
    )
