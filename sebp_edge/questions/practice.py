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
        name: as of a file, which questions in keywords use.
        questions: about its facts, each worded in several other ways.
    """

    name: str
    text: str
    questions: tuple[Question, ...]

    def in_keywords(self) -> list[Question]:
        """Returns questions in keywords about the same facts."""
        return [
            replace(cue, wordings=cue.wordings[: TURNS * KEYWORDS])
            for cue in ask_by_cues(self.text, self.name)
            if any(is_right(cue.answer, question.answer) for question in self.questions)
        ]


@cache
def practice_notes() -> tuple[PracticeNote, ...]:
    """Returns all practice notes, those of the settings in turn."""
    settings = [tomllib.loads(file.read_text(encoding="utf-8"))["note"] for file in sorted(FOLDER.glob("*.toml"))]
    return tuple(_note(**written) for together in zip(*settings, strict=True) for written in together)


def _note(name: str, text: str, facts: list[dict]) -> PracticeNote:
    return PracticeNote(name, text.strip(), tuple(Question(tuple(fact["ask"]), (), fact["answer"]) for fact in facts))
