"""Leaves out data that nobody reads within a text: of pictures and files, keys, certificates and encrypted messages.

The data of one photo would be more tokens than all of its owner's notes.
"""

import re
from collections import Counter

from sebp_edge.values.documents import Content, PromptCompletion

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
# Lines of base64 between marks, as of PGP and of certificates: quoted, indented, in a string with "\n", or cut off.
_LONG = re.compile("[A-Za-z0-9+/]{40}")
_CODE, _NEXT, _LINE_END = "[A-Za-z0-9+/]", r"(?:[\s>]|\\[rn])", r"[ \t]*\n[ \t>]*+"
_LAST_LINE = rf"(?:{_LINE_END}(?=\S*[\d+/=]){_CODE}{{1,76}}+=*+(?=[ \t]*$))?"
_ARMOUR = rf"""
    -{{4,5}}[ ]?BEGIN[ ](?P<kind>[A-Z0-9. ]{{2,60}}?)[ ]?-{{4,5}}
    (?:{_NEXT}*+[A-Z][\w-]{{1,40}}:[^\n\\]*)*+
    (?:
      (?=(?:{_CODE}|=|{_NEXT})*?{_CODE}{{40}})(?:{_CODE}|=|{_NEXT})*+-{{4,5}}[ ]?END[ ](?P=kind)[ ]?-{{4,5}}
    | (?:{_NEXT}++{_CODE}{{40,}}+=*+)++{_LAST_LINE}
    )
"""
_SECRET = re.compile(
    rf"""
      {_ARMOUR}
    | AAAA(?:[BC]3NzaC1|E2VjZHNh|[GI]nNr){_CODE}{{40,}}+=*+               # public keys of SSH
    | \beyJ[\w-]{{20,}}+\.eyJ[\w-]{{20,}}+\.[\w-]{{20,}}+                  # signed tokens
    | (?<![\w+/.:%-])(?={_CODE}{{60}})(?=[A-Z\d+/]{{0,59}}[a-z])(?=[a-z\d+/]{{0,59}}[A-Z])(?=[A-Za-z+/]{{0,59}}\d)
      (?:{_CODE}{{128,}}+|{_CODE}{{60,}}+(?={_LINE_END}{_CODE}{{60}}))(?:{_LINE_END}{_CODE}{{60,}}+)*+
      {_LAST_LINE}={{0,2}}(?![\w+/.:%-])
    """,
    re.VERBOSE | re.MULTILINE,
)
_SIGNED = re.compile(r"^[ \t>]*-----BEGIN PGP SIGNED MESSAGE-----\n(?:[ \t>]*Hash:.*\n)*", re.MULTILINE)


def without_data(content: Content) -> tuple[Content, Counter[str]]:
    """Returns a content without data that nobody reads, and how many of each kind. What describes them stays."""
    found: Counter[str] = Counter()
    if isinstance(content, str):
        return _without(content, found), found
    if isinstance(content, PromptCompletion):
        return PromptCompletion(*(_without(text, found) for text in content)), found
    messages = ({**message, "content": _without(message["content"], found)} for message in content.messages)
    return content._replace(messages=tuple(messages)), found


def _without(text: str, found: Counter[str]) -> str:
    number = 0

    def rest(mark: re.Match) -> str:
        nonlocal number
        if (mark["tag"] and not _IN_TAG.search(mark[0])) or (mark["other"] and len(mark[0]) < MIN_LENGTH):
            return mark[0]
        number += 1
        if mark["begin"]:
            return mark["begin"] + mark["end"]
        if mark["tag"]:
            return _IN_TAG.sub('""', mark[0]) if _ALT.search(mark[0]) else ""
        return mark["words"] or ""

    if _ADDRESS.search(text):
        text = _PICTURE.sub(rest, text)
    text, num_alone = _ALONE.subn("", text)
    text, num_secrets = _SECRET.subn("", text) if _LONG.search(text) else (text, 0)
    found["data of pictures and files within the text"] += number + num_alone
    found["keys, certificates and other data in base64 within the text"] += num_secrets
    return _SIGNED.sub("", text) if num_secrets else text
