"""Reads the marks of Obsidian's notes as a person sees them: links as their text; no embeds, queries or block ids."""

import re
from collections.abc import Iterator

from sebp_edge.reading.edits import Edit, edit, masked
from sebp_edge.reading.formats.markdown import Parts, Syntax

# Blocks that Obsidian replaces with their result.
_QUERIES = {"dataview", "dataviewjs", "tasks", "query", "base"}
# Within a line, code that begins with "=" is a query of Dataview only if it asks for notes or dates.
_INLINE_QUERY = re.compile(r"`+\s*\$?=(?=[^\n]*(?:\b(?:this|dv)\.|\[\[|\bdate\())")
_EMBED = r"!\[\[[^\[\]\n]*\]\]"
_CALLOUT = r"\[![\w|-]{1,40}\][+-]?"
_MARK = re.compile(
    rf"""
    (?=[ \t!\[>^])                                                # all begin so; at most places this is enough
    (?:
      (?P<embeds>^[ \t]*(?:{_EMBED}[ \t]*)+(?:\n|\Z) | {_EMBED})
    | \[\[(?P<link>[^\[\]\n]+)\]\]
    | ^(?P<quote>(?:[ ]{{0,3}}>){{1,9}}[ \t]*){_CALLOUT}(?:[ \t]*\n|[ \t]+(?P<title>(?=\S)))
    | (?:^|[ \t])\^[A-Za-z0-9-]{{1,40}}[ \t]*$                     # the id of a block
    )
    """,
    re.VERBOSE | re.MULTILINE,
)
_MARKS = re.compile(rf"\[\[|\[!|(?:^|[ \t])\^|`\s*\$?=|[`~]{{3}}[ \t]*(?i:{'|'.join(sorted(_QUERIES))})", re.MULTILINE)
OBSIDIAN = Syntax(comments=("<!--", "%%"), has_maths=True, marks=_MARKS)


def read_as_obsidian(text: str, parts: Parts, comments: list[Edit]) -> str:
    """Returns a note's text without comments and marks."""
    text, code = edit(text, [*comments, *_queries(text, parts)], parts.code)
    marks = _MARK.finditer(masked(text, code))
    return edit(text, [(*mark.span(), _text_of(mark, text)) for mark in marks], code)[0]


def _queries(text: str, parts: Parts) -> Iterator[Edit]:
    for (begin, end), language in parts.fenced:
        if language in _QUERIES:
            yield begin, end, ""
    for begin, end in parts.inline:
        if _INLINE_QUERY.match(text, begin, end):
            yield begin, end, ""


def _text_of(mark: re.Match, text: str) -> str:
    if mark["link"]:
        return _text_of_link(text[slice(*mark.span("link"))])
    # A callout without a title is a plain quote.
    return mark["quote"] if mark["title"] is not None else ""


def _text_of_link(link: str) -> str:
    """Returns what a link shows: its alias, or the name of its note and heading."""
    # In tables, the bar is escaped.
    target, _, alias = link.replace("\\|", "|").partition("|")
    if alias.strip():
        return alias.strip()
    note, *headings = target.split("#")
    names = [note.rpartition("/")[2].removesuffix(".md"), *(name for name in headings if not name.startswith("^"))]
    return " > ".join(name.strip() for name in names if name.strip())
