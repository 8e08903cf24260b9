"""Reads reStructuredText as it is written, without its comments."""

import re
from pathlib import Path

from sebp_edge.reading.edits import edit
from sebp_edge.reading.formats.encodings import decode
from sebp_edge.values.documents import NotRead, unix_newlines

# Explicit markup that is none of a directive, target, footnote or substitution, and the indented lines below it. Marks
# that are indented may stand in code.
_COMMENT = re.compile(
    r"^\.\.(?:[ \t]+(?!\S*[\w\"'`]::(?:\s|$)|_|\[[^\]\n]+\]|\|)\S.*|(?=\n[ \t]+\S))(?:\n(?:[ \t]*\n)*[ \t]+\S.*)*",
    re.MULTILINE,
)


def read_rst(path: Path) -> list[str | NotRead]:
    """Returns the text, and what was not read."""
    text = unix_newlines(decode(path))
    comments = [comment.span() for comment in _COMMENT.finditer(text) if _may_follow(text, comment.start())]
    text, _ = edit(text, [(*span, "") for span in comments], [])
    return [text, NotRead(f"comments: {len(comments):,}")] if comments else [text]


def _may_follow(text: str, position: int) -> bool:
    """Returns whether a comment may begin at a line: after nothing, a blank line, or other explicit markup."""
    before = text[text.rfind("\n", 0, max(0, position - 1)) + 1 : position]
    return not before.strip() or before.startswith(("..", " ", "\t"))
