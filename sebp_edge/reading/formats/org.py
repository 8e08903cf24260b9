"""Reads Org files (Emacs, Org-roam): their text, without what only Emacs reads."""

import re
from bisect import bisect_right
from pathlib import Path

from sebp_edge.reading.formats.encodings import decode
from sebp_edge.values.documents import NotRead, unix_newlines

_LINK = re.compile(r"\[\[([^\[\]\n]+)\](?:\[([^\[\]\n]+)\])?\]")
_HEADING = re.compile(
    r"(\*+)[ \t]+(?:(?:TODO|DONE|NEXT|WAITING|HOLD|CANCELL?ED|STARTED)[ \t]+)?(?:\[#\w\][ \t]+)?"
    r"(?P<comment>COMMENT(?:[ \t]|$))?"
)
_DRAWER = re.compile(r"[ \t]*:([\w-]+):[ \t]*$")
_END = re.compile(r"[ \t]*:END:[ \t]*$", re.IGNORECASE)
# Drawers that Emacs fills itself.
_OF_EMACS = {"PROPERTIES", "LOGBOOK"}
# Settings such as #+TITLE:, and a heading's planning.
_NOT_TEXT = re.compile(r"[ \t]*(?:#\+[\w-]+(?:\[[^\]]*\])?:|(?:SCHEDULED|DEADLINE|CLOSED):[ \t]*[<\[])")
_COMMENT = re.compile(r"[ \t]*#(?:[ \t]|$)")
_INLINE_COMMENT = re.compile(r"@@comment:.*?@@")
_BLOCK = re.compile(r"[ \t]*#\+BEGIN_(\w+)", re.IGNORECASE)
_BLOCK_END = re.compile(r"[ \t]*#\+END_(\w+)[ \t]*$", re.IGNORECASE)
_LITERAL = {"src", "example", "export"}


def read_org(path: Path) -> list[str | NotRead]:
    """Returns the text of an Org file: links as their text; no settings, drawers, comments or planning."""
    file = _OrgFile(unix_newlines(decode(path)).split("\n"))
    text = file.text()
    reasons = {"comments": file.num_comments, "drawers": file.num_drawers}
    return [text, *(NotRead(f"{reason}: {count:,}") for reason, count in reasons.items() if count)]


class _OrgFile:
    """The lines of an Org file; what is not closed before the next heading is text."""

    def __init__(self, lines: list[str]):
        self._lines = lines
        self._headings = [number for number, line in enumerate(lines) if _HEADING.match(line)]
        self._drawer_ends = [number for number, line in enumerate(lines) if _END.match(line)]
        self._block_ends: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            if end := _BLOCK_END.match(line):
                self._block_ends.setdefault(end[1].lower(), []).append(number)
        self.num_comments = self.num_drawers = 0

    def text(self) -> str:
        """Returns the text that is read, and counts what is not."""
        kept, number, was_comment = [], 0, False
        while number < len(self._lines):
            line, begin = self._lines[number], number
            number += 1
            is_comment = bool(_COMMENT.match(line))
            heading, drawer, block = _HEADING.match(line), _DRAWER.match(line), _BLOCK.match(line)
            if heading and heading["comment"]:
                number = self._end_of_section(begin, len(heading[1]))
                self.num_comments += 1
            elif drawer and (end := self._closed(begin, self._drawer_ends)):
                number = end + 1
                self.num_drawers += drawer[1].upper() not in _OF_EMACS
            elif block and (end := self._closed(begin, self._block_ends.get(block[1].lower(), []))):
                kind = block[1].lower()
                if kind in _LITERAL:
                    kept += self._lines[begin : end + 1]
                    number = end + 1
                elif kind == "comment":
                    number = end + 1
                    self.num_comments += 1
            elif is_comment:
                # Lines that follow each other are one comment.
                self.num_comments += not was_comment
            elif not (_NOT_TEXT.match(line) or _BLOCK_END.match(line)):
                line, num_inline = _INLINE_COMMENT.subn("", line)
                self.num_comments += num_inline
                kept.append(_LINK.sub(lambda link: link[2] or link[1], line))
            was_comment = is_comment
        return "\n".join(kept)

    def _closed(self, line: int, ends: list[int]) -> int | None:
        """Returns the first of the ends after a line and before the next heading, or None."""
        end, heading = bisect_right(ends, line), bisect_right(self._headings, line)
        if end == len(ends) or (heading < len(self._headings) and ends[end] > self._headings[heading]):
            return None
        return ends[end]

    def _end_of_section(self, line: int, level: int) -> int:
        """Returns the line of the next heading that is not below this one."""
        at = bisect_right(self._headings, line)
        for number in self._headings[at:]:
            if len(_HEADING.match(self._lines[number])[1]) <= level:
                return number
        return len(self._lines)
