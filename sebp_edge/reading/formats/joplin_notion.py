"""Reads what exports of Joplin and Notion add to a note: lines of properties, and links to ids.

Joplin's RAW export has them at the end of a file, such as "id: ...", and Notion's below the title of a page.
"""

import re
from typing import NamedTuple

from sebp_edge.reading.edits import Edit, edit, masked
from sebp_edge.reading.formats.markdown import Parts, Syntax
from sebp_edge.values.documents import Unreadable

_METADATA = re.compile(r"(?:\A|\n\n)((?:[a-z_]{2,40}:(?: [^\n]*)?\n)*type_: (\d{1,2}))\s*\Z")
# In characters.
_LONGEST = 100_000
_ID = re.compile(r"^id: \w+$", re.MULTILINE)
# Keys that tell its metadata from a user's own lines.
_OWN = re.compile(r"^(?:parent_id|note_id|created_time|user_created_time|encryption_applied|mime): ", re.MULTILINE)
_ENCRYPTED = re.compile(r"^encryption_applied: 1$", re.MULTILINE)
_HTML = re.compile(r"^markup_language: 2$", re.MULTILINE)
_NOTE = "1"
NO_NOTE = "what Joplin keeps beside its notes, such as a notebook or a tag"
ENCRYPTED = "encrypted by Joplin; export it again with encryption off"

JOPLIN_MARK = re.compile(
    r"(?P<picture>!)?\[(?P<words>[^\[\]\n]*)\]\(:/[0-9a-f]{32}[^()\n]*\)|<img\b[^<>\n]*[\"']:/[0-9a-f]{32}[^<>\n]*>"
)
JOPLIN = Syntax(marks=re.compile(":/[0-9a-f]{32}"))


class Metadata(NamedTuple):
    """Where the metadata begins, and whether the note before it is HTML."""

    begin: int
    is_html: bool


def find_metadata(text: str) -> Metadata | None:
    """Finds Joplin's metadata at the end of a text; None if there are none.

    Raises:
        Unreadable: the file is an encrypted note, or something else than a note, such as a tag.
    """
    tail = max(0, len(text) - _LONGEST)
    found = _METADATA.search(text, tail) if "\ntype_: " in text[tail:] else None
    if not (found and _ID.search(found[1]) and _OWN.search(found[1])):
        return None
    if found[2] != _NOTE:
        raise Unreadable(NO_NOTE)
    if _ENCRYPTED.search(found[1]):
        raise Unreadable(ENCRYPTED)
    return Metadata(found.start(), bool(_HTML.search(found[1])))


def read_links(mark: re.Pattern, text: str, parts: Parts, comments: list[Edit]) -> str:
    """Returns a note's text without comments: links to a program's notes as their "words", and no "picture"."""
    text, code = edit(text, comments, parts.code)
    links = mark.finditer(masked(text, code))
    return edit(text, [(*link.span(), _text_of_link(link, text)) for link in links], code)[0]


def _text_of_link(link: re.Match, text: str) -> str:
    begin, end = link.span("words")
    return "" if link["picture"] or begin < 0 else text[begin:end]


# ------------------------------------------------------------------------------------------- Notion

_NAME = re.compile(r".* [0-9a-f]{32}\.(?:md|markdown)", re.IGNORECASE)
_TITLE = re.compile(r"# [^\n]*(?:\n|\Z)\n*")
_PROPERTY = re.compile(r"([^\s:][^:\n]{0,79}): [^\n]*(?:\n|\Z)")
# A single line may be prose with a colon, unless it begins with one of these.
_ALONE = {
    *("created", "created time", "created by", "last edited time", "last edited by", "date", "due", "due date", "tags"),
    *("tag", "status", "url", "type", "owner", "author", "category", "priority", "assign", "assignee", "person"),
}
NOTION_MARK = re.compile(
    r"(?P<picture>!)\[[^\[\]\n]*\]\((?!\w+:)(?:[^()\s]|\([^()\s]*\))*\)"
    r"|\[(?P<words>[^\[\]\n]*)\]\((?=[^()\s]*(?:\([^()\s]*\))?[^()\s]*[0-9a-f]{32})(?:[^()\s]|\([^()\s]*\))*\)"
)
NOTION = Syntax(marks=re.compile(r"[0-9a-f]{32}|!\["))


def is_notion_page(name: str) -> bool:
    """Returns whether a file has a name as Notion gives to the pages that it exports, which ends in their id."""
    return bool(_NAME.fullmatch(name))


def without_properties(text: str) -> tuple[str, int]:
    """Returns the text of a page without its properties, and how many there were.

    Raises:
        Unreadable: the page has no text, as most rows of databases.
    """
    title = _TITLE.match(text)
    at = begin = title.end() if title else 0
    names = []
    while line := _PROPERTY.match(text, at):
        names.append(line[1].lower())
        at = line.end()
    are_properties = text[at : at + 1] in ("", "\n") and (len(names) > 1 or set(names) <= _ALONE)
    if not are_properties:
        at, names = begin, []
    if not text[at:].strip():
        raise Unreadable("a page of Notion without text")
    return text[:begin] + text[at:].lstrip("\n"), len(names)
