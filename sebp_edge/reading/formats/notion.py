"""Reads what Notion's export adds to a page: lines of properties below its title, and links to ids."""

import re

from sebp_edge.reading.formats.markdown import Syntax
from sebp_edge.values.documents import Unreadable

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
    """Returns the text of a page without its properties, and how many there were."""
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
