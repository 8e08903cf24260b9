"""Reads what Joplin's RAW export adds to a note: lines such as "id: ..." at the end of its file, and links to ids."""

import re

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


def find_metadata(text: str) -> tuple[int, bool] | None:
    """Returns where Joplin's metadata begin at the end of a text, and whether it is HTML; None if there are none."""
    tail = max(0, len(text) - _LONGEST)
    found = _METADATA.search(text, tail) if "\ntype_: " in text[tail:] else None
    if not (found and _ID.search(found[1]) and _OWN.search(found[1])):
        return None
    if found[2] != _NOTE:
        raise Unreadable(NO_NOTE)
    if _ENCRYPTED.search(found[1]):
        raise Unreadable(ENCRYPTED)
    return found.start(), bool(_HTML.search(found[1]))


def read_links(mark: re.Pattern, text: str, parts: Parts, comments: list[Edit]) -> str:
    """Returns a note's text without comments: links to a program's notes as their "words", and no "picture"."""
    text, code = edit(text, comments, parts.code)
    links = mark.finditer(masked(text, code))
    return edit(text, [(*link.span(), _text_of_link(link, text)) for link in links], code)[0]


def _text_of_link(link: re.Match, text: str) -> str:
    begin, end = link.span("words")
    return "" if link["picture"] or begin < 0 else text[begin:end]
