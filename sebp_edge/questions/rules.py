"""Makes questions about a note by rules, without a model."""

from dataclasses import replace

from sebp_edge.questions.answers import plain_words
from sebp_edge.questions.clauses import PRONOUNS
from sebp_edge.questions.facts import Core, Fact
from sebp_edge.questions.notes import Note, read_note
from sebp_edge.questions.question import MAX_ANSWER_WORDS, Question, distinct
from sebp_edge.questions.sentences import facts_of_sentences
from sebp_edge.questions.structures import facts_of_structures
from sebp_edge.questions.subjects import DETERMINERS, FUNCTION_WORDS
from sebp_edge.questions.wordings import worded

# Facts of one note that are asked for; the most specific ones.
MAX_FACTS = 24
MAX_QUESTION_CHARACTERS = 300
_MAX_GIST_WORDS = 45


def ask(text: str, name: str | None = None) -> list[Question]:
    """Returns questions about one note; the same ones each time.

    Args:
        text: the note, as Markdown or plain text.
        name: the name of its file, for a note without a title.
    """
    note = read_note(text, name)
    spaced = _spaced(note.text)
    facts = [fact for fact in [*facts_of_structures(note), *facts_of_sentences(note)] if _is_good(fact, spaced)]
    facts = sorted(_unambiguous(facts), key=lambda fact: -fact.rank)[:MAX_FACTS]
    gist = _gist(note)
    return distinct([_checked(worded(fact)) for fact in facts] + ([worded(gist)] if gist and facts else []))


def _gist(note: Note) -> Fact | None:
    """Returns what the note begins with, if its title says what it is about."""
    topic = note.subject.topic
    sentences = [sentence for section in note.sections for sentence in section.sentences]
    long = [
        sentence
        for sentence in sentences
        if sentence[-1] in ".!" and sentence[0].isupper() and 6 <= len(sentence.split()) <= _MAX_GIST_WORDS // 2
    ]
    if not topic or not note.is_english or not long:
        return None
    cores = (
        Core(f"What do my notes say about {topic}?", f"what my notes say about {topic}"),
        Core(f"What did I write about {topic}?", f"what I wrote about {topic}"),
    )
    return Fact(long[0], cores, is_gist=True)


def _is_good(fact: Fact, note: str) -> bool:
    answer = _words(fact.answer)
    trivial = FUNCTION_WORDS | DETERMINERS | {"me", "us", "him", "them", "place"} | PRONOUNS
    return (
        0 < len(answer) <= MAX_ANSWER_WORDS
        and not all(word in trivial for word in answer)
        and "http" not in fact.answer
        and f" {' '.join(answer)} " in note
        and all(len(core.direct) <= MAX_QUESTION_CHARACTERS and not _holds(core.direct, answer) for core in fact.cores)
        and (fact.cores or not _holds(fact.keywords, answer))
    )


def _unambiguous(facts: list[Fact]) -> list[Fact]:
    """Leaves out facts with the same question but another answer, and repeated facts."""
    answers = {}
    for fact in facts:
        answers.setdefault(_key(fact), set()).add(" ".join(_words(fact.answer)))
    merged = {}
    for fact in facts:
        if len(answers[_key(fact)]) == 1:
            merged.setdefault(_key(fact), fact)
    return list(merged.values())


def _key(fact: Fact) -> tuple[str, ...]:
    first = fact.cores[0].direct if fact.cores else fact.keywords
    return (fact.topic or "", *_words(first))


def _checked(question: Question) -> Question:
    """Leaves out wordings that give the answer away."""
    answer = _words(question.answer)
    kept = tuple(wording for wording in question.wordings if not _holds(wording, answer))
    return replace(question, wordings=kept)


def _holds(text: str, words: list[str]) -> bool:
    return f" {' '.join(words)} " in _spaced(text)


def _spaced(text: str) -> str:
    return f" {' '.join(_words(text))} "


def _words(text: str) -> list[str]:
    return [part for word in plain_words(text) for part in word.split("_") if part]
