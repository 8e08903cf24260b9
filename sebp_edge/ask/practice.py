"""Bundled notes of invented people, with questions in a person's words.

They are set on a space station, in a fairy tale and aboard a ship, so that their facts are not taken for those of a
user's notes. A file `practice/*.toml` in another language adds notes in it.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sebp_edge.values.documents import Document
from sebp_edge.values.reading import Reading

FOLDER = Path(__file__).parent / "practice"


@dataclass(frozen=True, slots=True)
class PracticeQuestion:
    """A question about a note in several wordings, and its answer in the note's own words."""

    wordings: tuple[str, ...]
    answer: str


def practice_questions() -> dict[str, tuple[PracticeQuestion, ...]]:
    """Returns the questions about each practice note, by its text."""
    return {
        written["text"].strip(): tuple(
            PracticeQuestion(tuple(fact["ask"]), fact["answer"]) for fact in written["facts"]
        )
        for written in _written()
    }


def practice_reading() -> Reading:
    """Returns the practice notes as documents."""
    return Reading(
        [Document(f"practice/{each['name']}.md", each["text"].strip(), each["name"]) for each in _written()], []
    )


@cache
def _written() -> tuple[dict, ...]:
    return tuple(
        note
        for file in sorted(FOLDER.glob("*.toml"))
        for note in tomllib.loads(file.read_text(encoding="utf-8"))["note"]
    )
