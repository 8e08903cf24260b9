"""Bundled notes of invented people, with questions in a person's words.

Those of `PRACTICE` are trained on. They are set on a space station, in a fairy tale and aboard a ship, so that their
facts are not taken for those of a user's notes. A file `practice/*.toml` in another language adds notes in it.

Those of `QUIZ` are asked about by the gate only. They are everyday notes, since nobody learns them. No setting may be
chosen by them.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sebp_edge.values.documents import Document
from sebp_edge.values.reading import Reading

PRACTICE, QUIZ = (Path(__file__).parent / name for name in ("practice", "quiz"))


@dataclass(frozen=True, slots=True)
class PracticeQuestion:
    """A question about a note in several wordings, and its answer in the note's own words."""

    wordings: tuple[str, ...]
    answer: str


def practice_questions(folder: Path = PRACTICE) -> dict[str, tuple[PracticeQuestion, ...]]:
    """Returns the questions about each note of a folder, by its text."""
    return {
        written["text"].strip(): tuple(
            PracticeQuestion(tuple(fact["ask"]), fact["answer"]) for fact in written["facts"]
        )
        for written in _written(folder)
    }


def practice_reading(folder: Path = PRACTICE) -> Reading:
    """Returns the notes of a folder as documents."""
    return Reading(
        [Document(f"{folder.name}/{each['name']}.md", each["text"].strip(), each["name"]) for each in _written(folder)],
        [],
    )


@cache
def _written(folder: Path) -> tuple[dict, ...]:
    return tuple(
        note
        for file in sorted(folder.glob("*.toml"))
        for note in tomllib.loads(file.read_text(encoding="utf-8"))["note"]
    )
