"""Invents people with their notes, and a quiz about the notes: two facts of each note, each asked once.

The kinds of note are written by hand; names, places, dates, codes and amounts are drawn. A name or a date stands in one
note of a person, so that no note answers another note's question. Rules and settings were chosen with the people of
know_kinds_tuning.toml; those of know_kinds_test.toml were written apart from the rules, and are for testing only.
"""

import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from string import ascii_uppercase

from quality.quizzes import MONTHS, Question

TUNING, TEST = (Path(__file__).with_name(f"know_kinds_{use}.toml") for use in ("tuning", "test"))
SLOT = re.compile(r"\{(\w+)\}")
STREET_ENDS = ("Street", "Lane", "Road", "Row")
LAST_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True)
class Note:
    """One note: its file's name, and the Markdown in it."""

    file: str
    text: str


@dataclass(frozen=True)
class Person:
    """A person with notes, and the quiz about them; `name` says who it is and with which seed."""

    name: str
    notes: tuple[Note, ...]
    quiz: tuple[Question, ...]

    def write(self, folder: Path) -> None:
        """Writes each note to a file of the folder."""
        for note in self.notes:
            (folder / note.file).write_text(note.text, encoding="utf-8")


def person(seed: int, notes: int = 60, kinds_file: Path = TEST) -> Person:
    """Invents a person; the same seed gives the same person, and fewer notes are the first of more.

    Raises:
        ValueError: there are not so many kinds and subjects.
    """
    people, kinds, words = written(kinds_file)
    who = sorted(people)[seed % len(people)]
    draw = random.Random(seed)
    subjects = _subjects([kind for kind in kinds if who in kind["who"]], draw)
    if not 1 <= notes <= len(subjects):
        raise ValueError(f"A {who} has 1 to {len(subjects)} notes, but {notes} were asked for.")
    values = Values(draw, people[who]["constants"], words)
    made = [note_of(kind, subject, values) for kind, subject in subjects[:notes]]
    return Person(
        f"{who} {seed}",
        tuple(note for note, _ in made),
        tuple(question for _, questions in made for question in questions),
    )


@cache
def written(kinds_file: Path) -> tuple[dict, list[dict], dict[str, list[str]]]:
    """The people, the kinds of note and the general words, as they are in the file."""
    content = tomllib.loads(kinds_file.read_text(encoding="utf-8"))
    return content["people"], content["kind"], {sort: text.split() for sort, text in content["general"].items()}


def _subjects(kinds: list[dict], draw: random.Random) -> list[tuple[dict, str]]:
    """All kinds with their subjects in random order: each kind once, then each a second time, and so on."""
    shuffled = [(kind, draw.sample(kind["subjects"], len(kind["subjects"]))) for kind in kinds]
    draw.shuffle(shuffled)
    rounds = max(len(subjects) for _, subjects in shuffled)
    return [(kind, subjects[turn]) for turn in range(rounds) for kind, subjects in shuffled if turn < len(subjects)]


def note_of(kind: dict, subject: str, values: "Values") -> tuple[Note, list[Question]]:
    texts = (kind["title"], kind["text"], *(fact["ask"] for fact in kind["facts"]))
    filled = {"subject": subject, "Subject": subject[0].upper() + subject[1:]}
    # In the order of the text, so that the same seed gives the same values.
    for name in dict.fromkeys(SLOT.findall("\n".join(texts))):
        if name not in filled:
            filled[name] = values.draw(name, kind)
    title = kind["title"].format(**filled)
    file = "-".join(re.findall(r"\w+", title.lower())) + ".md"
    questions = [
        Question(file, fact["ask"].format(**filled), tuple(answer.format(**filled) for answer in fact["answers"]))
        for fact in kind["facts"]
    ]
    return Note(file, kind["text"].format(**filled)), questions


class Values:
    """Draws a person's values: no general value twice, and none of a kind's own values twice in notes of this kind."""

    def __init__(self, draw: random.Random, constants: dict[str, list[str]], words: dict[str, list[str]]):
        self._draw = draw
        self._constants = {name: draw.choice(choices) for name, choices in constants.items()}
        self._general = _general(draw, words)
        self._left: dict = {}

    def draw(self, name: str, kind: dict) -> str:
        if name in self._constants:
            return self._constants[name]
        own_values = kind.get("values", {})
        sort = name if name in own_values else name.rstrip("0123456789")
        own = own_values.get(sort)
        key = (kind["title"], sort) if own else sort
        if key not in self._left:
            choices = _range_or_list(own) if own else self._general[sort]
            self._left[key] = self._draw.sample(choices, len(choices))
        return self._left[key].pop()


def _range_or_list(written: list) -> list[str]:
    """The values that a kind names: all numbers from one to another, or a list."""
    if isinstance(written[0], int):
        return [str(number) for number in range(written[0], written[1] + 1)]
    return written


def _general(draw: random.Random, words: dict[str, list[str]]) -> dict[str, list[str]]:
    """The values for any kind, by sort."""
    numbers = draw.sample(range(1000, 10000), 400)
    days = (
        f"{day} {month.title()}" for month, last in zip(MONTHS, LAST_DAYS, strict=True) for day in range(1, last + 1)
    )
    return words | {
        "street": [f"{name} {end}" for name, end in zip(words["street"], cycle(STREET_ENDS), strict=False)],
        # There are only seven, so they come back.
        "weekday": 20 * words["weekday"],
        "date": list(days),
        "time": [f"{hour:02}:{minute:02}" for hour in range(7, 22) for minute in range(5, 60, 5)],
        "pin": [str(number) for number in numbers[:200]],
        "code": ["".join(draw.choices(ascii_uppercase, k=2)) + f"-{number}" for number in numbers[200:]],
    }
