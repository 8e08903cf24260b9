"""Reads Markdown files: front matter, comments and what programs add are left out, and the rest stays as it is."""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sebp_edge.reading.edits import Edit, edit
from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.formats.front_matter import front_matter
from sebp_edge.reading.formats.html import html_text
from sebp_edge.reading.formats.joplin_notes import JOPLIN, JOPLIN_MARK, find_metadata, read_links
from sebp_edge.reading.formats.logseq import LOGSEQ, page_properties, read_as_logseq
from sebp_edge.reading.formats.markdown import COMMON, entities, find_parts
from sebp_edge.reading.formats.notion import NOTION, NOTION_MARK, is_notion_page, without_properties
from sebp_edge.reading.formats.obsidian import OBSIDIAN, read_as_obsidian
from sebp_edge.reading.vaults import Vault
from sebp_edge.values.documents import NotRead, Unreadable, unix_newlines

_APPS = {
    "Obsidian": (OBSIDIAN, read_as_obsidian),
    "Logseq": (LOGSEQ, read_as_logseq),
    "Joplin": (JOPLIN, partial(read_links, JOPLIN_MARK)),
    "Notion": (NOTION, partial(read_links, NOTION_MARK)),
}
_BLANKS = re.compile(r"[ \t]*")
# A setting of a plugin of Obsidian, which a note keeps in any folder.
_PLUGIN = re.compile(r"^[\"']?([\w-]+)-plugin[\"']?:", re.MULTILINE)
_WORD = re.compile(r"\w")


def read_note(path: Path, vault: Vault | None = None) -> list[str | NotRead | Unreadable]:
    """Returns the text of a Markdown file that a person sees, and what was not read."""
    text = unix_newlines(decode(path))
    front = front_matter(text)
    plugins = _PLUGIN.findall(front)
    if path.stem.lower().endswith(".excalidraw") or "excalidraw" in plugins:
        raise Unreadable("an Excalidraw drawing")
    text = text[len(front) :]
    if note := joplin_note(text):
        return note
    app = vault.app if vault else "Obsidian" if plugins else None
    if app == "Logseq":
        front += (properties := page_properties(text))
        text = text[len(properties) :]
    not_read = [NotRead("", front)] * bool(front)
    if app is None and is_notion_page(path.name):
        app = "Notion"
        text, num_properties = without_properties(text)
        not_read += [NotRead(f"Notion's properties: {num_properties:,}")] * bool(num_properties)
    seen = visible_text(text, app)
    read: str | Unreadable = seen.text
    if not read.strip() and (front or _WORD.search(text)):
        others = ", embeds, queries, templates or comments" if _WORD.search(text) else ""
        read = Unreadable(f"only properties{others}")
    return [read, *not_read, *comments_not_read([seen])]


def joplin_note(text: str) -> list[str | NotRead]:
    """Returns the text of a file of Joplin's RAW export, and what was not read; an empty list if it is none."""
    if (metadata := find_metadata(text)) is None:
        return []
    begin, is_html = metadata
    text, not_read = text[:begin], NotRead("Joplin's metadata")
    if is_html:
        title, _, page = text.partition("\n")
        return [f"{title}\n\n{html_text(page)}", not_read]
    seen = visible_text(text, "Joplin")
    return [seen.text, not_read, *comments_not_read([seen])]


# Where a blog cuts off its front page, or puts a table of contents; no words of the author's.
_MARK_OF_BLOG = re.compile(r"<!--\s*(?:more|break|excerpt|truncate|toc)\s*-->", re.IGNORECASE)


class Seen(NamedTuple):
    """What a person sees of a text.

    Attributes:
        num_comments: how many comments it has, without marks for a blog's program.
        is_cut: whether the last of them is never closed, and so hides the rest.
    """

    text: str
    num_comments: int = 0
    is_cut: bool = False


def comments_not_read(texts: list[Seen]) -> list[NotRead]:
    """Returns what was not read of the texts of one document."""
    number = sum(seen.num_comments for seen in texts)
    reasons = [f"comments: {number:,}"] * bool(number)
    reasons += ["all after a comment that is never closed"] * any(seen.is_cut for seen in texts)
    return [NotRead(reason) for reason in reasons]


def visible_text(text: str, app: str | None = None) -> Seen:
    """Returns a Markdown text without comments and without the marks of the program that it is from.

    Args:
        text: the text with Unix newlines and without front matter.
        app: "Obsidian", "Logseq", "Joplin" or "Notion", if it is from one of these.
    """
    syntax, read_marks = _APPS.get(app, (COMMON, None))
    parts = find_parts(text, syntax)
    comments: list[Edit] = [(begin, _BLANKS.match(text, end).end(), "") for begin, end in parts.comments]
    edits = [*comments, *entities(text, parts.code)]
    seen = read_marks(text, parts, edits) if read_marks else edit(text, edits, [])[0]
    num_comments = sum(not _MARK_OF_BLOG.fullmatch(text[slice(*span)]) for span in parts.comments)
    return Seen(seen, num_comments, parts.is_cut)
