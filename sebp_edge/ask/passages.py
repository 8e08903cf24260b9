"""Cuts documents into passages: a few blocks each (headings, items of lists, paragraphs), below their headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from sebp_edge.ask.terms import plain
from sebp_edge.ask.values import values
from sebp_edge.values.documents import Content, Conversation, Document

# In characters. A document or section of at most MAX is one passage; one of less than MIN is joined with the next.
MAX_CHARACTERS, MIN_CHARACTERS = 1000, 300

_HEADING = re.compile(r"(#{1,6})[ \t]+(\S.*?)[ \t]*#*$|(={1,6})[ \t]+(\S.*?)(?:[ \t]+=+)?$|(\*{1,6})[ \t]+(\S.*)$")
_UNDERLINE = re.compile(r"(?:=+|-{3,}|~{3,})\s*$")
_ITEM = re.compile(r"\s*(?:[-*+•–]|\d{1,3}[.)]|[a-z]\))\s+\S")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
# When a note was made, in its front matter.
_MADE = re.compile(r"^\W*(?:date|created|datum|erstellt|fecha|data)\b.*", re.IGNORECASE | re.MULTILINE)
_ROW = re.compile(r"\s*\|")
_SENTENCE = re.compile(r"(?<=[.!?])[\"”’)]?\s+|(?<=[。！？])")


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document, as it stands there.

    Attributes:
        document: the document's source.
        headings: those that the passage stands under, from the outermost.
        line: of the document's front matter and text, from 1, on which the passage begins.
        date: the day of its innermost heading with one, else of the front matter or the file's name, such as
            "2024-03-04"; empty if none has a year.
        path: the document's file; see `Document`.
    """

    document: str
    headings: tuple[str, ...]
    line: int
    text: str
    date: str = ""
    path: str | None = None

    @property
    def place(self) -> str:
        """The document and the headings, such as "trips.md, Norway, Cabins"."""
        return ", ".join((self.document, *self.headings))

    @property
    def shown(self) -> str:
        """The passage below its place, as a model is shown it."""
        return f"{self.place}\n{self.text}"


class _Block(NamedTuple):
    """A heading, an item, a row, a paragraph or code, from one character of the text to another."""

    begin: int
    end: int
    level: int = 0
    title: str = ""


def passages_of(document: Document) -> list[Passage]:
    """Returns the passages of a document; together they hold all of its text, after its front matter."""
    text = document.front_matter + text_of(document.content)
    found, headings, kept = [], [], ()
    begin = end = 0
    for block in _blocks(text):
        size = end - begin
        too_long = block.end - begin > MAX_CHARACTERS
        if size and (too_long or (block.level and size >= MIN_CHARACTERS and len(text) > MAX_CHARACTERS)):
            found.append((begin, end, kept))
            size = 0
        if block.level:
            headings = [each for each in headings if each.level < block.level] + [block]
        if not size:
            begin, kept = block.begin, tuple(each.title for each in headings if each is not block)
        end = block.end
    if end > begin:
        found.append((begin, end, kept))
    lines, at, passages = 1, 0, []
    made = _day("\n".join(_MADE.findall(document.front_matter))) or _day(PurePath(document.source).stem)
    for begin, end, titles in found:
        lines, at = lines + text.count("\n", at, begin), begin
        own = text[begin:end].split("\n", 1)[0]
        dated = (own if _HEADING.match(own) else "", *reversed(titles))
        date = next(filter(None, map(_day, dated)), made)
        passages.append(Passage(document.source, titles, lines, text[begin:end].rstrip(), date, document.path))
    return passages


def _day(text: str) -> str:
    """Returns the first day with a year in a text; empty if there is none."""
    dates = values(plain(text.replace("_", "-"))).dates if text else []
    return next((f"{date.year}-{date.day}" for date in dates if date.year), "")


def text_of(content: Content) -> str:
    """Returns a content as one text: a conversation as lines that begin with who speaks."""
    if isinstance(content, Conversation):
        return "\n".join(f"{message.get('author') or message['role']}: {message['content']}" for message in content[0])
    return content if isinstance(content, str) else "\n\n".join(content)


def _blocks(text: str) -> Iterator[_Block]:
    lines, begins, at = text.split("\n"), [], 0
    for line in lines:
        begins.append(at)
        at += len(line) + 1
    begins.append(at)
    stars_are_headings = bool(re.search(r"^\*\* \S", text, re.MULTILINE))
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        number += 1
        if not line.strip():
            continue
        if heading := _HEADING.match(line):
            if stars_are_headings or not heading[5]:
                level = len(heading[1] or heading[3] or heading[5])
                yield _Block(begins[first], begins[number] - 1, level, heading[2] or heading[4] or heading[6])
                continue
        elif number < len(lines) and _UNDERLINE.match(lines[number]) and len(line) <= 80 and not _is_marked(line):
            number += 1
            level = 1 if lines[number - 1][0] == "=" else 2
            yield _Block(begins[first], begins[number] - 1, level, line.strip())
            continue
        if fence := _FENCE.match(line):
            while number < len(lines) and not lines[number].strip().startswith(fence[1]):
                number += 1
            number = min(number + 1, len(lines))
        elif not _ROW.match(line):
            while number < len(lines) and lines[number].strip() and not _is_marked(lines[number]):
                number += 1
        yield from _pieces(text, begins[first], min(begins[number] - 1, len(text)))


def _is_marked(line: str) -> bool:
    """Whether a line begins a block of its own."""
    return bool(_ITEM.match(line) or _ROW.match(line) or _FENCE.match(line) or _HEADING.match(line))


def _pieces(text: str, begin: int, end: int) -> Iterator[_Block]:
    """Yields a block, in pieces if it is too long: at ends of sentences or lines, else at spaces, else anywhere."""
    while end - begin > MAX_CHARACTERS:
        part = text[begin : begin + MAX_CHARACTERS]
        ends = [found.end() for found in _SENTENCE.finditer(part)] or [
            found.end() for found in re.finditer(r"\s", part)
        ]
        cut = begin + (ends[-1] if ends and ends[-1] > MIN_CHARACTERS else MAX_CHARACTERS)
        yield _Block(begin, cut)
        begin = cut
    if text[begin:end].strip():
        yield _Block(begin, end)
