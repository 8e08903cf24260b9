"""Names files that are not read, and exports of other programs, each with what to do about it."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

# What a file is by its ending, and what to do; several endings are apart by blanks.
_BY_ENDING = {
    ".textpack .bear2bk": ("a Bear archive", "export the notes as Markdown"),
    ".one .onepkg .onetoc2": ("a OneNote file", "export its pages as Word files (.docx)"),
    ".qmd .rmd": ("Markdown with code (Quarto or R)", "save it as .md"),
    ".adoc .asciidoc": ("an AsciiDoc file", "convert it to Markdown"),
    ".tex": ("a LaTeX file", "convert it to Markdown, or save it as .txt"),
    ".textile .mediawiki .wiki .creole": ("a wiki page", "convert it to Markdown, or save it as .txt"),
    ".opml": ("an outline (OPML)", "export it as Markdown"),
    ".canvas": ("an Obsidian canvas", "its notes are read from their own files"),
    ".excalidraw .drawio": ("a drawing", "write its text into a note to use it"),
    ".doc .dot .wps .wpd": ("a document in an old format", "save it as .docx"),
    ".pages": ("a Pages document", "export it as Word (.docx)"),
    ".gdoc": ("a link to a Google document", "download it as .docx or .md"),
    ".epub .mobi .prc .azw .azw3 .azw4 .kfx .fb2 .fbz .lit .lrf .ibooks": (
        "a book, not a text of yours",
        "save it as .txt or .docx if you wrote it",
    ),
    ".ppt .pptx .odp .key": ("slides", "export their text as .txt or .pdf"),
    ".xls .xlsx .ods .numbers": ("a spreadsheet", 'export it as .csv with a column "text"'),
    ".mbx .pst .ost": ("a mailbox", "export it as .mbox"),
    ".msg": ("e-mail", "save it as .eml"),
    ".vcf .ics": ("contacts or a calendar", "export them as .txt to use them"),
    ".srt .vtt .sub": ("subtitles", "save them as .txt"),
    ".xml .xhtml .mhtml .mht .webarchive": ("a page or data in XML or an archive", "save it as .html"),
    ".yaml .yml .toml .edn .ini": ("settings or data", "save texts as .txt or .md"),
    ".ndjson .jsonlines": ("records in lines", "rename it to .jsonl"),
    ".parquet .arrow .feather": ("a table", "save it as .jsonl"),
    ".sqlite .sqlite3 .db": ("a database", "export its texts as Markdown or .jsonl"),
    ".zip": ("an archive", "give it by itself to look into it"),
    ".tar .gz .tgz .bz2 .xz .7z .rar .zst": ("an archive", "unpack it, and give the folder"),
    ".png .jpg .jpeg .gif .webp .heic .svg .tif .tiff .bmp": ("a picture", "only texts are read"),
    ".mp3 .m4a .wav .ogg .opus .flac .mp4 .mov .mkv .webm": ("a recording", "only texts are read"),
}
_ENDINGS = {ending: entry for endings, entry in _BY_ENDING.items() for ending in endings.split()}


# Notion puts a page's id at the end of names.
_NOTION_TABLE = re.compile(r".* [0-9a-f]{32}(?:_all)?\.csv", re.IGNORECASE)


def reason_against_name(name: str) -> str | None:
    """Returns what a file with this name is and what to do; None if that is not known, or the file may be read."""
    if _NOTION_TABLE.fullmatch(name):
        return "a database exported from Notion; its pages are in the .md files beside it"
    ending = PurePath(name).suffix.lower()
    if ending not in _ENDINGS:
        return None
    what, advice = _ENDINGS[ending]
    return f"{what} ({ending}); {advice}"


def _items(value: Any, key: str) -> list[dict]:
    """Returns the objects in the list under a key, at most the first three."""
    found = value.get(key)
    return [item for item in found[:3] if isinstance(item, dict)] if isinstance(found, list) else []


def _has(value: Any, *keys: str) -> bool:
    return all(key in value for key in keys)


def _is_roam(value: dict) -> bool:
    own = [*_items(value, "children"), value]
    return "title" in value and any(
        _has(each, "string") or _has(each, "edit-time") or _has(each, ":block/uid") for each in own
    )


_ID_OF_DISCORD = re.compile(r"\d{17,20}")


def _is_channel(value: dict) -> bool:
    """Whether this is a channel of Slack or of Discord, or Discord's list of their names by their ids."""
    is_of_discord = bool(value) and all(map(_ID_OF_DISCORD.fullmatch, map(str, value)))
    return is_of_discord or _has(value, "id", "created", "members") or _ID_OF_DISCORD.fullmatch(str(value.get("id")))


_AS_MARKDOWN = "export it as Markdown"
_AS_MESSAGES = 'save its conversations as records with "messages"'
# What an object looks like, and what to do.
_BY_SHAPE: list[tuple[str, Callable[[dict], bool], str]] = [
    ("a Roam export", _is_roam, _AS_MARKDOWN),
    (
        "a Logseq export",
        lambda value: "version" in value and any("page-name" in item for item in _items(value, "blocks")),
        _AS_MARKDOWN,
    ),
    ("a channel of Discord or Slack", _is_channel, "what was said there is in other files"),
    (
        "an export of Messenger or Instagram",
        lambda value: any(_has(item, "sender_name", "timestamp_ms") for item in _items(value, "messages")),
        _AS_MESSAGES,
    ),
    ("a Discord export", lambda value: _has(value, "guild", "channel", "messages"), _AS_MESSAGES),
    (
        "a Google Keep note",
        lambda value: "textContent" in value or ("listContent" in value and "title" in value),
        'save its text as .txt, or as a record with "text"',
    ),
    (
        "a Day One export",
        lambda value: "metadata" in value and any("creationDate" in item for item in _items(value, "entries")),
        "export it as plain text",
    ),
    (
        "a Standard Notes backup",
        lambda value: any("content_type" in item for item in _items(value, "items")),
        "export the notes as plain text",
    ),
    (
        "the settings of a text bundle",
        lambda value: "creatorIdentifier" in value or value.get("type") == "net.daringfireball.markdown",
        "its text is in the file beside them",
    ),
    (
        "a Simplenote export",
        lambda value: isinstance(value.get("activeNotes"), list),
        "use the .txt files of the export",
    ),
]


def foreign_export(value: Any) -> str | None:
    """Returns which program's export a value of JSON looks like and what to do, such as "this looks like a Roam
    export; export it as Markdown"; None if it looks like no known one."""
    if not isinstance(value, dict):
        return None
    found = next(((name, advice) for name, looks_so, advice in _BY_SHAPE if looks_so(value)), None)
    return found and f"this looks like {found[0]}; {found[1]}"
