"""Asks for the values of a note by their type and the words around them, whatever the grammar of the sentence.

A person who asks about a note uses some of its words, a question word, and the title: "When clock brought in?" stands
for all such questions. Fragments and sentences that no other rule understands are asked about in this way.
"""

import re
from collections.abc import Iterator

from sebp_edge.questions.cue_values import Cue, find_cues
from sebp_edge.questions.cue_wordings import Title, content, word_cue
from sebp_edge.questions.notes import Note, read_note
from sebp_edge.questions.question import Question
from sebp_edge.questions.subjects import subject_of, title_from_name

# Questions of each note: so many, or one for so many words of a longer one, but not more than these.
FEW_QUESTIONS = 16
WORDS_PER_QUESTION = 6
MAX_QUESTIONS = 48
# Kinds whose values may be anything: in a note with too many values, they are not asked for.
_VAGUE = frozenset({"thing", "kind", "place", "label", "target"})

# Question words for each kind. In those with a unit, it stands for {}.
ASKS = {
    "date": ("when", "on which date", "what date"),
    "year": ("which year", "in what year", "when"),
    "time": ("what time", "at what time", "when"),
    "money": ("how much", "what price", "how much money"),
    "share": ("what share", "how much", "what percentage"),
    "duration": ("how long", "how many {}", "for how long"),
    "length": ("how long", "how many {}", "what length"),
    "distance": ("how far", "how many {}", "what distance"),
    "weight": ("how much", "how many {}", "what weight"),
    "volume": ("how much", "how many {}", "what amount"),
    "speed": ("how fast", "how many {}", "what speed"),
    "temperature": ("what temperature", "how many degrees", "how warm"),
    "colour": ("what colour", "which colour", "what color"),
    "number of": ("how many {}", "how many", "what number"),
    "code": ("which number", "what code", "what number"),
    "amount": ("how many", "how much", "what number"),
    "reason": ("why", "for what reason", "how come"),
    "called": ("what name", "what is it called", "who"),
    "place": ("where", "in which place", "whereabouts"),
    "origin": ("where from", "from where", "from what"),
    "giver": ("from whom", "who", "where from"),
    "agent": ("who", "whom", "which person"),
    "target": ("to whom", "where", "who"),
    "address": ("where", "at which address", "whereabouts"),
    "name": ("who", "which", "what"),
    "thing": ("what", "which thing", "what exactly"),
    "label": ("what", "which", "what exactly"),
    "kind": ("what", "what sort", "what exactly"),
}
_LINE = re.compile(r"^\s*(?:[-*+•]|\d+[.)])?\s*(?:\[[ xX]\]\s*)?(?P<text>.*\S)\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z\d\"'“])")


def ask_by_cues(text: str, name: str | None = None) -> list[Question]:
    """Returns questions for the values of an English note; none of another language; arguments as for `rules.ask`."""
    note = read_note(text, name)
    if not note.is_english:
        return []
    titles = _titles(note, name)
    asked: dict[str, tuple[Cue, Question]] = {}
    for sentence in _sentences(note.text):
        for cue in find_cues(sentence, note.subject.title):
            if wordings := word_cue(cue, _asks(cue), titles, note.words):
                asked.setdefault(wordings[0], (cue, Question(wordings, (), cue.value)))
    most = min(MAX_QUESTIONS, max(FEW_QUESTIONS, len(note.text.split()) // WORDS_PER_QUESTION))
    clear_first = sorted(asked.values(), key=lambda pair: pair[0].kind in _VAGUE)
    return [question for _, question in clear_first[:most]]


def _titles(note: Note, name: str | None) -> list[Title]:
    """Returns the note's title, and the name of its file if that has other words; those that are not empty."""
    subject, file = note.subject, subject_of(title_from_name(name), note.words, is_english=True)
    others = content(file.title, subject.title)
    found = [subject] if not others or not subject.title else [subject, file]
    return [Title(each.title, each.phrase or each.title) for each in found if each.title]


def _sentences(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if line.lstrip().startswith(("#", "|", ">", "http", "<")):
            continue
        found = _LINE.match(line)
        if found:
            yield from (part for part in _SENTENCE_END.split(found["text"]) if 2 <= len(part.split()) <= 40)


def _asks(cue: Cue) -> tuple[str, str, str]:
    """Returns three ways to begin a question for a value."""
    return tuple(ask.format(cue.unit).strip() for ask in ASKS[cue.kind])
