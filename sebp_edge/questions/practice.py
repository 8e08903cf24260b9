"""Bundled notes of invented people, whose facts are also asked for in a person's words.

A model answers questions in words that it was not trained on if other facts were trained on in many ways, as Allen-Zhu
and Li (2024, "Physics of language models: part 3.1") show for biographies. So the facts of these notes are trained on
in keywords, as those of a user's notes are, and in a person's words, too. The notes are set on a space station, in a
fairy tale and aboard a ship, so that their facts are not taken for those of a user's notes.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sebp_edge.questions.answers import is_right
from sebp_edge.questions.cues import ask_by_cues
from sebp_edge.questions.question import Question
from sebp_edge.texts.examples import TURNS

FOLDER = Path(__file__).parent / "practice"
# Wordings of a fact in keywords in each epoch.
KEYWORDS = 2


@dataclass(frozen=True, slots=True)
class PracticeNote:
    """A bundled note.

    Attributes:
        questions: about its facts, each worded in several other ways.
        in_keywords: about the same facts, in keywords.
    """

    text: str
    questions: tuple[Question, ...]
    in_keywords: tuple[Question, ...]


@cache
def practice_notes() -> tuple[PracticeNote, ...]:
    """Returns all practice notes, those of the settings in turn."""
    settings = [tomllib.loads(file.read_text(encoding="utf-8"))["note"] for file in sorted(FOLDER.glob("*.toml"))]
    return tuple(_note(written) for together in zip(*settings, strict=True) for written in together)


def _note(written: dict) -> PracticeNote:
    text, facts = written["text"].strip(), written["facts"]
    in_keywords = tuple(
        replace(cue, wordings=cue.wordings[: TURNS * KEYWORDS])
        for cue in ask_by_cues(text, written["name"])
        if any(is_right(cue.answer, fact["answer"]) for fact in facts)
    )
    return PracticeNote(text, tuple(Question(tuple(fact["ask"]), (), fact["answer"]) for fact in facts), in_keywords)
