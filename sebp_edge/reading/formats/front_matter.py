"""Finds front matter: a mapping in YAML, TOML or JSON at the beginning of a Markdown text.

Two rules with prose between them are not front matter, as with "Note: it rains.", and neither are slides.
"""

import json
import re
import tomllib

import yaml

# In characters; what is longer is text.
MAX_LENGTH = 65_536
# Written in C if PyYAML has it, which takes a twentieth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MARK = re.compile(r"(---|\+\+\+)(?:yaml|json|toml)?[ \t]*\n")
_CLOSED_BY = {
    "---": re.compile(r"^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.MULTILINE),
    "+++": re.compile(r"^\+\+\+[ \t]*(?:\n|\Z)", re.MULTILINE),
}
# A key is a name, not a sentence that ends in a colon.
_KEY = re.compile(r"[^\s,;:!?\"]{1,60}(?:[ :][^\s,;:!?\"]{1,60}){0,3}")
# Lines of a mapping that is not valid YAML, as with a second colon in a title, and one of its keys.
_LINES = re.compile(r"(?:(?:[\w.-]{1,60}:(?:[ \t].*)?|- .*|[ \t].*|#.*|)(?:\n|\Z))*+")
_LINE = re.compile(r"^([\w.-]{1,60}):[ \t]*(.*)$", re.MULTILINE)
# Keys that show that it is one.
_WELL_KNOWN = {
    *("title", "subtitle", "date", "tags", "keywords", "aliases", "layout", "author", "authors", "slug", "created"),
    *("updated", "modified", "category", "categories", "id", "description", "summary", "abstract", "source", "status"),
    *("cssclass", "cssclasses", "publish", "draft", "permalink", "excalidraw-plugin", "kanban-plugin"),
}
_SENTENCE = re.compile(r"[^\[{&*!|>'\"](?:.*[.!?…]|\S*(?: \S+){2,})", re.DOTALL)


def front_matter(text: str) -> str:
    """Returns the front matter at the beginning of a text, with its marks; "" if there is none."""
    if text.startswith("{") and "\n" in text:
        return _json(text)
    mark = _MARK.match(text)
    closing = mark and _CLOSED_BY[mark[1]].search(text, mark.end(), MAX_LENGTH)
    if not closing:
        return ""
    content = text[mark.end() : closing.start()]
    if not content.strip():
        return text[: closing.end()] if closing[0].startswith(mark[1]) else ""
    # Before a blank line, a mark may be a rule, and what follows a heading.
    may_be_rule = not content.split("\n", 1)[0].strip()
    if may_be_rule and content.lstrip().startswith("#"):
        return ""
    is_mapping = _is_yaml(content, may_be_rule) or (mark[1] == "+++" and _is_toml(content))
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


def _is_yaml(content: str, may_be_rule: bool) -> bool:
    try:
        # Composed only: to construct the values of a hostile mapping can take for ever.
        node = yaml.compose(content, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError, ValueError):
        pairs = _LINE.findall(content) if _LINES.fullmatch(content) else []
    else:
        nodes = node.value if isinstance(node, yaml.MappingNode) else []
        # Of values, only what is written without quotes and on one line.
        pairs = [
            (key.value, value.value if isinstance(value, yaml.ScalarNode) and not value.style else "")
            for key, value in nodes
        ]
    if not pairs or not all(isinstance(key, str) and _KEY.fullmatch(key) for key, _ in pairs):
        return False
    are_names = all(key == key.lower() and " " not in key for key, _ in pairs)
    if any(key.lower() in _WELL_KNOWN for key, _ in pairs):
        return are_names or len(pairs) > 1 or not may_be_rule
    if may_be_rule and not (are_names and len(pairs) > 1):
        return False
    # A slide's heading rather than a comment, or prose such as "Note: it rains.".
    has_sentence = any(_SENTENCE.fullmatch(value) for _, value in pairs)
    is_prose = has_sentence and (len(pairs) == 1 or all(key[0].isupper() for key, _ in pairs))
    return not (content.startswith("#") or is_prose)
