"""Finds front matter: a mapping in YAML, TOML or JSON at the beginning of a Markdown text.

Two rules with prose between them are not front matter, and neither are slides.
"""

import json
import re
import tomllib

import yaml

# In characters; what is longer is text.
MAX_LENGTH = 65_536
# Written in C if PyYAML has it, which takes a twentieth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MARK = re.compile(r"(---|\+\+\+)[ \t]*\n")
_CLOSED_BY = {
    "---": re.compile(r"^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.MULTILINE),
    "+++": re.compile(r"^\+\+\+[ \t]*(?:\n|\Z)", re.MULTILINE),
}
# A key is a name, not a sentence that ends in a colon.
_KEY = re.compile(r"[^\s,;:!?\"]{1,60}(?: [^\s,;:!?\"]{1,60}){0,3}")
# Lines of a mapping that is not valid YAML, as with a second colon in a title, and keys that show that it is one.
_LINES = re.compile(r"(?:(?:[\w.-]{1,60}:(?:[ \t].*)?|- .*|[ \t].*|#.*|)(?:\n|\Z))*+")
_WELL_KNOWN = re.compile(
    r"^(?:title|date|tags|aliases|layout|author|slug|created|updated|categories|id):", re.MULTILINE
)


def front_matter(text: str) -> str:
    """Returns the front matter at the beginning of a text, with its marks; "" if there is none."""
    if text.startswith("{") and "\n" in text:
        return _json(text)
    mark = _MARK.match(text)
    closing = mark and _CLOSED_BY[mark[1]].search(text, mark.end(), MAX_LENGTH)
    if not closing:
        return ""
    content = text[mark.end() : closing.start()]
    if not content:
        return text[: closing.end()] if closing[0].startswith(mark[1]) else ""
    # As in Pandoc, a mark before a blank line is a rule.
    if not content.split("\n", 1)[0].strip():
        return ""
    is_mapping = _is_yaml(content) or (mark[1] == "+++" and _is_toml(content))
    return text[: closing.end()] if is_mapping else ""


def _json(text: str) -> str:
    """Returns the object that a text begins with, if something follows it on later lines."""
    try:
        value, end = json.JSONDecoder().raw_decode(text[:MAX_LENGTH])
    except (ValueError, RecursionError):
        return ""
    line, newline, rest = text[end:].partition("\n")
    is_front_matter = isinstance(value, dict) and value and not line.strip() and rest.strip()
    return text[: end + len(line) + len(newline)] if is_front_matter else ""


def _is_toml(content: str) -> bool:
    try:
        return bool(tomllib.loads(content))
    except (ValueError, RecursionError):
        return False


def _is_yaml(content: str) -> bool:
    try:
        # Composed only: to construct the values of a hostile mapping can take for ever.
        node = yaml.compose(content, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError, ValueError):
        return bool(_LINES.fullmatch(content) and _WELL_KNOWN.search(content))
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if content.startswith("#") and not _WELL_KNOWN.search(content):
        return False  # A slide's heading rather than a comment.
    return bool(keys) and all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys)
