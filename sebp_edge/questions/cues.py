"""Asks for the values of a note by their type and the words around them, whatever the grammar of the sentence.

A person who asks about a note uses some of its words, a question word, and the title: "When clock brought in?" stands
for all such questions. Fragments and sentences that no other rule understands are asked about in this way.
"""

from collections import Counter

from sebp_edge.questions.cue_values import Cue, find_cues, is_empty
from sebp_edge.questions.cue_wordings import Title, content, word_cue
from sebp_edge.questions.notes import Note, read_note
from sebp_edge.questions.passages import Passage, passages_of, pieces
from sebp_edge.questions.question import Question, distinct
from sebp_edge.questions.subjects import Subject, subject_of, title_from_name

# Questions of each note: so many, or one for so many words of a longer one, but not more than these.
FEW_QUESTIONS = 20
WORDS_PER_QUESTION = 5
MAX_QUESTIONS = 48
# Kinds whose values may be anything: in a note with too many values, they are not asked for.
_VAGUE = frozenset({"thing", "kind", "place", "label", "target", "said"})
# A passage without a value is an answer itself, or its pieces are, of so many words.
MAX_WORDS_SAID = 8

# Question words for each kind. In those with a unit, it stands for {}.
ASKS = {
    "date": ("when", "on which date", "what date", "what day", "until when", "since when"),
    "year": ("which year", "in what year", "when", "how old"),
    "time": ("what time", "at what time", "when", "how early"),
    "money": ("how much", "what price", "how much money", "what amount"),
    "share": ("what share", "how much", "what percentage", "how many per cent"),
    "duration": ("how long", "how many {}", "for how long", "how much time"),
    "length": ("how long", "how many {}", "what length", "what size", "how wide"),
    "distance": ("how far", "how many {}", "what distance"),
    "weight": ("how much", "how many {}", "what weight", "how heavy"),
    "volume": ("how much", "how many {}", "what amount"),
    "speed": ("how fast", "how many {}", "what speed"),
    "temperature": ("what temperature", "how many degrees", "how warm", "how hot"),
    "colour": ("what colour", "which colour", "what color"),
    "number of": ("how many {}", "how many", "what number", "how much"),
    "code": ("which number", "what code", "what number", "which", "what"),
    "words": ("what", "which words", "what name", "what was said", "which"),
    "amount": ("how many", "how much", "what number", "which number"),
    "reason": ("why", "for what reason", "how come", "what reason"),
    "called": ("what name", "what is it called", "who", "which"),
    "place": ("where", "in which place", "whereabouts", "in what spot", "what place"),
    "origin": ("where from", "from where", "from what", "what"),
    "giver": ("from whom", "who", "where from", "whose"),
    "agent": ("who", "whom", "which person", "with whom"),
    "target": ("to whom", "where", "who", "what place"),
    "address": ("where", "at which address", "whereabouts", "what address"),
    "name": ("who", "which", "what", "whom", "what name", "whose"),
    "thing": ("what", "which thing", "what exactly", "which"),
    "label": ("what", "which", "what exactly", "which one"),
    "kind": ("what", "what sort", "what exactly", "which"),
    "said": ("what", "what about", "how", "which", "why", "what exactly"),
}


def ask_by_cues(text: str, name: str | None = None) -> list[Question]:
    """Returns questions for the values of an English note; none of another language; arguments as for `rules.ask`."""
    note = read_note(text, name)
    if not note.is_english:
        return []
    found = [(cue, passage) for passage in passages_of(note) for cue in _cues(passage.text, note)]
    of_kind = Counter(cue.kind for cue, _ in found)
    titles = _titles(note, name)
    asked: dict[str, tuple[Cue, Question]] = {}
    for cue, passage in found:
        is_only = cue.kind not in _VAGUE and of_kind[cue.kind] == 1
        if wordings := word_cue(cue, _asks(cue), _within(passage, titles, note), note.words, is_only=is_only):
            asked.setdefault(wordings[0], (cue, Question(wordings, (), cue.value)))
    most = min(MAX_QUESTIONS, max(FEW_QUESTIONS, len(note.text.split()) // WORDS_PER_QUESTION))
    clear_first = sorted(asked.values(), key=lambda pair: pair[0].kind in _VAGUE)
    return distinct([question for _, question in clear_first[:most]], least=2)


def _cues(text: str, note: Note) -> list[Cue]:
    """Returns the values of a passage, or its own short pieces if none are found."""
    found = find_cues(text, note.subject.title, note.words.names)
    if found:
        return found
    short = (piece.strip(" .;,-–—!?") for piece in pieces(text, MAX_WORDS_SAID))
    return [Cue("said", piece, text, 0, len(text)) for piece in short if _says_more(piece, note)]


def _says_more(piece: str, note: Note) -> bool:
    """Whether a piece without values says something that can be asked for: two words that are not in the title."""
    return len({word for word in content(piece, note.subject.title) if len(word) > 2}) >= 2 and not is_empty(piece)


def _titles(note: Note, name: str | None) -> list[Title]:
    """Returns the note's title, and the name of its file if that has other words; those that are not empty."""
    subject, file = note.subject, subject_of(title_from_name(name), note.words, is_english=True)
    others = content(file.title, subject.title)
    found = [subject] if not others or not subject.title else [subject, file]
    return [_title(each) for each in found if each.title]


def _within(passage: Passage, titles: list[Title], note: Note) -> list[Title]:
    """Returns the passage's heading, if it has one, before the note's titles."""
    heading = subject_of(passage.heading, note.words, is_english=True)
    return [_title(heading), *titles] if heading.title else titles


def _title(subject: Subject) -> Title:
    return Title(subject.title, subject.phrase or subject.title)


def _asks(cue: Cue) -> tuple[str, ...]:
    """Returns ways to begin a question for a value."""
    return tuple(ask.format(cue.unit).strip() for ask in ASKS[cue.kind])
