"""Reads Org files (Emacs, Org-roam): their text, without what only Emacs reads."""

import re
from pathlib import Path

from sebp_edge.texts.documents import unix_newlines
from sebp_edge.texts.formats.encodings import decode

_LINK = re.compile(r"\[\[([^\[\]\n]+)\](?:\[([^\[\]\n]+)\])?\]")
_DRAWER = re.compile(r"[ \t]*:[\w-]+:[ \t]*$")
_END = re.compile(r"[ \t]*:END:[ \t]*$", re.IGNORECASE)
# Settings such as #+TITLE:, comments, and a heading's planning.
_NOT_TEXT = re.compile(r"[ \t]*(?:#\+[\w-]+(?:\[[^\]]*\])?:|#(?:[ \t]|$)|(?:SCHEDULED|DEADLINE|CLOSED):[ \t]*[<\[])")
_BLOCK = re.compile(r"[ \t]*#\+(BEGIN|END)_(\w+)", re.IGNORECASE)
_LITERAL = {"src", "example", "export"}


def read_org(path: Path) -> str:
    """Returns the text of an Org file: links as their text; no settings, drawers, comments or planning.

    Raises:
        Unreadable: see `decode`.
    """
    lines = unix_newlines(decode(path)).split("\n")
    last_end = max((number for number, line in enumerate(lines) if _END.match(line)), default=-1)
    kept, in_drawer, block = [], False, ""
    for number, line in enumerate(lines):
        mark = _BLOCK.match(line)
        if in_drawer:
            in_drawer = not _END.match(line)
        elif mark:
            block = mark[2].lower() if mark[1].upper() == "BEGIN" else ""
            if mark[2].lower() in _LITERAL:
                kept.append(line)
        elif block in _LITERAL:
            kept.append(line)
        elif block == "comment" or _NOT_TEXT.match(line):
            continue
        elif _DRAWER.match(line) and number < last_end:
            in_drawer = True
        else:
            kept.append(_LINK.sub(lambda link: link[2] or link[1], line))
    return "\n".join(kept)
