"""Reads Markdown, and the notes of Obsidian and Logseq, which have marks of their own that no reader sees.

What a program computes from other notes (embeds, queries, references to blocks) is left out, since those notes are read
themselves. Code is kept as it is.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sebp_edge.texts.documents import Unreadable, unix_newlines
from sebp_edge.texts.formats.encodings import decode
from sebp_edge.texts.vaults import Vault

# As in Pandoc, a mark before a blank line is a horizontal rule, not the start of front matter.
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?![ \t]*\n)(?:.*\n)*?\1[ \t]*(?:\n|\Z)")


def read_note(path: Path, vault: Vault | None = None) -> str:
    """Returns the text of a Markdown file without its front matter; that of a vault's note without the vault's marks.

    Raises:
        Unreadable: see `decode`; or it is a drawing.
    """
    text = unix_newlines(decode(path))
    front = _FRONT_MATTER.match(text)
    body = text[front.end() :] if front else text
    if vault is None:
        return body
    if vault.app == "Logseq":
        return _EMPTY_BULLET.sub("", _without_marks(_without_blocks(body), _LOGSEQ_MARK, _logseq_text))
    if path.stem.lower().endswith(".excalidraw") or (front and "excalidraw-plugin:" in front[0]):
        raise Unreadable("an Excalidraw drawing")
    return _without_marks(body, _OBSIDIAN_MARK, _obsidian_text)


# ---------------------------------------------------------------------------------------------- code and prose

_FENCE = re.compile(r"[ \t>]*(?:[-*+][ \t]+)?(`{3,}|~{3,})[ \t]*([\w-]*)")
# Blocks that Obsidian replaces with their result.
_QUERIES = {"dataview", "dataviewjs", "tasks", "query", "base"}


def _without_marks(text: str, mark: re.Pattern, text_of: Callable[[re.Match], str]) -> str:
    """Replaces the marks in the prose of a note, and drops its queries."""
    return "".join(part if is_code else mark.sub(text_of, part) for is_code, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yields blocks of code and the prose between them, in order, as (is code, text); leaves out queries."""
    lines, fence, language = [], "", ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if not fence and found:
            yield False, "".join(lines)
            lines, fence, language = [line], found[1], found[2].lower()
        elif fence and found and found[1].startswith(fence) and not line[found.end() :].strip():
            if language not in _QUERIES:
                yield True, "".join([*lines, line])
            lines, fence = [], ""
        else:
            lines.append(line)
    # A fence that is never closed may be no code at all.
    yield False, "".join(lines)


# ---------------------------------------------------------------------------------------------- Obsidian

_EMBED = r"!\[\[[^\[\]\n]*\]\]"
_CALLOUT = r"\[![\w|-]{1,40}\][+-]?"
_OBSIDIAN_MARK = re.compile(
    rf"""
      (?P<query>`\$?=[^`\n]*`)                                    # inline Dataview
    | (?P<code>(?P<ticks>`{{1,2}})[^`\n]+(?P=ticks))
    | (?P<embeds>^[ \t]*(?:{_EMBED}[ \t]*)+(?:\n|\Z) | {_EMBED})
    | \[\[(?P<link>[^\[\]\n]+)\]\]
    | %%(?s:.*?)%%[ \t]*                                          # a comment
    | ^(?P<quote>(?:[ ]{{0,3}}>){{1,9}}[ \t]*){_CALLOUT}(?:[ \t]*\n|[ \t]+(?P<title>(?=\S)))
    | [ \t]\^[A-Za-z0-9-]{{1,40}}[ \t]*$                          # the id of a block
    """,
    re.VERBOSE | re.MULTILINE,
)


def _obsidian_text(mark: re.Match) -> str:
    if mark["link"]:
        return _text_of_link(mark["link"])
    # A callout without a title is a plain quote.
    return mark["quote"] if mark["title"] is not None else mark["code"] or ""


def _text_of_link(link: str) -> str:
    """Returns what a link shows: its alias, or the name of its note and heading."""
    # In tables, the bar is escaped.
    target, _, alias = link.replace("\\|", "|").partition("|")
    if alias.strip():
        return alias.strip()
    note, *headings = target.split("#")
    names = [note.rpartition("/")[2].removesuffix(".md"), *(name for name in headings if not name.startswith("^"))]
    return " > ".join(name.strip() for name in names if name.strip())


# ---------------------------------------------------------------------------------------------- Logseq

_LOGSEQ_MARK = re.compile(
    r"""
      (?P<code>(?P<ticks>`{1,2})[^`\n]+(?P=ticks))
    | \{\{[^{}\n]*\}\}                                            # an embed or a query
    | !?\(\([0-9a-fA-F-]{36}\)\)                                  # a reference to a block
    | \[(?P<label>[^\[\]\n]*)\]\((?:\[\[[^\[\]\n]*\]\]|\(\([0-9a-fA-F-]{36}\)\))\)
    | \[\[(?P<link>[^\[\]\n]+)\]\]
    """,
    re.VERBOSE,
)
_BULLET = re.compile(r"([ \t]*)[-*](?:[ \t]+|$)")
_EMPTY_BULLET = re.compile(r"^[ \t]*[-*][ \t]*(?:\n|\Z)", re.MULTILINE)
_PROPERTY = re.compile(r"[ \t]*(?:[-*][ \t]+)?[\w/.?-]{1,100}::(?:[ \t]|$)")
_TEMPLATE = re.compile(r"[ \t]*(?:[-*][ \t]+)?template::[ \t]*\S", re.IGNORECASE)
_PLANNED = re.compile(r"[ \t]*(?:SCHEDULED|DEADLINE|CLOSED):[ \t]*[<\[]")
# What begins a drawer or a query, and its last line.
_CLOSED_BY = {
    re.compile(r"[ \t]*:(?:LOGBOOK|PROPERTIES):[ \t]*$", re.IGNORECASE): ":END:",
    re.compile(r"[ \t]*(?:[-*][ \t]+)?#\+BEGIN_QUERY\b", re.IGNORECASE): "#+END_QUERY",
}


def _logseq_text(mark: re.Match) -> str:
    if mark["link"]:
        return mark["link"].rpartition("/")[2].strip()
    return mark["code"] or mark["label"] or ""


def _without_blocks(text: str) -> str:
    """Drops properties, planning, drawers, queries and templates, which are lines of an outline's blocks."""
    kept: list[str] = []
    # The open blocks, as their indent and where they begin in `kept`; the indent of the template that is skipped.
    blocks: list[tuple[int, int]] = []
    template: int | None = None
    closed_by, is_code = "", False
    for line in text.split("\n"):
        if (bullet := _BULLET.match(line)) and not is_code:
            indent = len(bullet[1].expandtabs(4))
            while blocks and blocks[-1][0] >= indent:
                blocks.pop()
            if template is not None and indent <= template:
                template = None
            blocks.append((indent, len(kept)))
        if closed_by:
            closed_by = "" if line.strip().upper() == closed_by else closed_by
        elif template is not None:
            continue
        elif is_code or line.count("```") % 2:
            is_code ^= line.count("```") % 2 == 1
            kept.append(line)
        elif _TEMPLATE.match(line) and blocks:
            template, start = blocks[-1]
            del kept[start:]
        elif ends := [end for begin, end in _CLOSED_BY.items() if begin.match(line)]:
            closed_by = ends[0]
        elif not (_PROPERTY.match(line) or _PLANNED.match(line)):
            kept.append(line)
    return "\n".join(kept)
