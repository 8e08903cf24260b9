"""What a question is answered with: the reply, whether it stands in the passages, and else a quotation."""

from dataclasses import dataclass

from sebp_edge.ask.index import Hit
from sebp_edge.ask.passages import Passage
from sebp_edge.ask.sentences import best_sentence, closest, line_of, sentences_of
from sebp_edge.ask.several import asks_for_several, in_order
from sebp_edge.ask.standing import stands_in

NOT_FOUND = "Not in your notes."
# The passages that a model is shown. The first is the right one nearly always, and small models read one better than
# three (kernels/bench/how-the-recipes-were-chosen.md).
NUM_PASSAGES = 1

# Below it, nothing was found (see `Hit`). The middle of the range in which at most 10 % of the development people's
# questions that their notes answer are refused, and at least 80 % of others, with 20 to 1,000 notes.
MIN_STRENGTH = 1.2
# A reply is told if the model has it likelier than all others together. Below it, most are wrong
# (kernels/bench/how-the-recipes-were-chosen.md).
MIN_PROBABILITY = 0.5


@dataclass(frozen=True)
class Answer:
    """An answer. The text and the sources are the user's: for the screen, never for logs.

    Attributes:
        text: the reply or the quotation; "Not in your notes." if nothing was found.
        found: whether the documents have passages that the question is about.
        quoted: whether `text` is a sentence of the first source, since no model read it, was not sure of its reply, or
            its reply did not stand there.
        sources: the best passages, first the one with the answer: document, headings, line, text.
        sentence: the one of the first source that is quoted, or has most words of the reply, as it stands there.
        line: on which that sentence begins in its document.
        sentences: of each source, if the question is about several notes; `text` has them with their dates, a line
            each. Empty otherwise.
    """

    text: str
    found: bool
    quoted: bool = False
    sources: tuple[Passage, ...] = ()
    sentence: str = ""
    line: int | None = None
    sentences: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether no model is to read the sources: nothing was found, or several notes are listed."""
        return not self.found or bool(self.sentences)


def is_found(hits: list[Hit]) -> bool:
    """Whether the best passage is about the question, rather than one that shares words with it."""
    return bool(hits) and hits[0].strength >= MIN_STRENGTH


def quoted(question: str, hits: list[Hit], num_passages: int) -> Answer:
    """Returns the best sentence of what was found as the answer, which takes no model; or that nothing was found.

    A question about several notes is answered with a sentence of each (see `in_order`).

    Args:
        hits: the best ones, and more than `num_passages` if the question is about several notes.
    """
    if not is_found(hits):
        return Answer(NOT_FOUND, found=False)
    if asks_for_several(question) and len(several := in_order(question, hits)) > 1:
        return _listed(question, tuple(hit.passage for hit in several))
    return checked("", 0.0, question, tuple(hit.passage for hit in hits[:num_passages]))


def _listed(question: str, passages: tuple[Passage, ...]) -> Answer:
    sentences = tuple(best_sentence(question, each) for each in passages)
    lines = (f"{each.date} {' '.join(said.split())}".strip() for each, said in zip(passages, sentences, strict=True))
    line = line_of(sentences[0], passages[0])
    return Answer("\n".join(lines), True, True, passages, sentences[0], line, sentences)


def checked(reply: str, probability: float, question: str, passages: tuple[Passage, ...]) -> Answer:
    """Returns a reply as the answer if it is likely and stands in a passage, else the best sentence of the first one.

    Args:
        probability: that the model gives to the reply, rather than to any other.
    """
    reply = reply.strip() if probability >= MIN_PROBABILITY else ""
    source = next((each for each in passages if reply and stands_in(reply, question, each.shown)), None)
    is_quoted, first = source is None, source or passages[0]
    sentence = best_sentence(question, first) if is_quoted else closest(sentences_of(first), reply, question)
    text = " ".join(sentence.split()) if is_quoted else reply
    sources = (first, *(each for each in passages if each is not first))
    return Answer(text, True, is_quoted, sources, sentence, line_of(sentence, first))
