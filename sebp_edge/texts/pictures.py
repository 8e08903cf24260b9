"""Leaves out the data of pictures and files that stand within a text, alone or as addresses that begin with "data:".

The data of one photo would be more tokens than all of its owner's notes.
"""

import re

from sebp_edge.texts.documents import Completion, Content

# In characters; shorter data is an example that somebody wrote about, unless it is a picture's.
MIN_LENGTH = 64

_TYPE = r"data:(?:[a-z]{1,20}\\?/[\w.+-]{1,100})?(?:;[\w.-]{1,40}=[\w.%-]{1,100}){0,4}"
# Base64 may be wrapped: full lines, and the rest of the last one.
_LINE = r"[A-Za-z0-9+/=_%-]"
_LAST = rf"{_LINE}{{1,59}}+(?:(?<==)|(?=[ \t]*[\"'>)]))"
_WRAPPED = rf"(?:(?:\s++{_LINE}{{60,}}+)++(?:\s++{_LAST})?|\n[ \t]*{_LAST})?"
_BASE64 = rf"{_TYPE};base64,\s?{_LINE}++{_WRAPPED}"
_PERCENT = rf"{_TYPE}(?:;(?!base64,)[\w-]{{1,20}})?,[^\s\"'()<>\[\]{{}}]++"
_DATA = rf"(?:{_BASE64}|{_PERCENT})"
# What the data of pictures (PNG, JPEG, GIF, WebP, SVG) and of PDF files begin with.
_SIGNATURE = r"(?:iVBORw0KGgo|/9j/[24]|R0lGOD[dl]h|UklGR|PHN2Zy|JVBERi0)"
_TITLE = r"(?:\s+(?:\"[^\"\n]*\"|'[^'\n]*'))?"
_ALT = re.compile(r"\salt\s*=\s*(?:\"[^\"]*[^\"\s][^\"]*\"|'[^']*[^'\s][^']*'|[^\s\"'>]+)", re.IGNORECASE)
_PICTURE = re.compile(
    rf"""
      (?P<nameless>!\[\s*\]\(\s*<?{_DATA}>?{_TITLE}\s*\))
    | (?P<definition>^[ ]{{0,3}}\[[^\[\]\n]{{1,200}}\]:[ \t]*<?{_DATA}>?{_TITLE}[ \t]*(?:\n|\Z))
    | (?P<begin>\]\(\s*<?){_DATA}(?P<end>>?{_TITLE}\s*\))
    | (?P<tag><img\b(?:"[^"]*"|'[^']*'|[^"'<>])*+>)
    | \[\[(?P<link>{_DATA})(?:\]\[(?P<words>[^\[\]\n]*))?\]\]       # as in Org
    | (?P<other>{_DATA})
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_ALONE = re.compile(rf"{_SIGNATURE}{_LINE}{{{MIN_LENGTH},}}+{_WRAPPED}")
_ADDRESS = re.compile("data:", re.IGNORECASE)
_IN_TAG = re.compile(rf"\"\s*data:[^\"]*\"|'\s*data:[^']*'|(?<==){_DATA}", re.IGNORECASE)


def without_data(content: Content) -> tuple[Content, int]:
    """Returns a content without the data of pictures and files, and how many there were. What describes them stays."""
    if isinstance(content, str):
        return _without(content)
    if isinstance(content, Completion):
        (prompt, first), (completion, second) = map(_without, content)
        return Completion(prompt, completion), first + second
    number, messages = 0, []
    for message in content.messages:
        text, found = _without(message["content"])
        number += found
        messages.append({**message, "content": text})
    return content._replace(messages=tuple(messages)), number


def _without(text: str) -> tuple[str, int]:
    number = 0

    def rest(found: re.Match) -> str:
        nonlocal number
        number += 1
        if found["begin"]:
            return found["begin"] + found["end"]
        if found["tag"]:
            if not _IN_TAG.search(found[0]):
                number -= 1
                return found[0]
            return _IN_TAG.sub('""', found[0]) if _ALT.search(found[0]) else ""
        if found["other"] and len(found[0]) < MIN_LENGTH:
            number -= 1
            return found[0]
        return found["words"] or ""

    if _ADDRESS.search(text):
        text = _PICTURE.sub(rest, text)
    text, num_alone = _ALONE.subn("", text)
    return text, number + num_alone
