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


def _looks(*keys: str, **in_lists: str) -> Callable[[dict], bool]:
    """Returns a function that tells whether an object has these keys.

    Args:
        in_lists: the keys, apart by blanks, that one of the first three objects in a list has, by the list's key.
    """

    def looks_so(value: dict) -> bool:
        return value.keys() >= {*keys} and all(
            any(item.keys() >= {*own.split()} for item in _items(value, key)) for key, own in in_lists.items()
        )

    return looks_so


def _items(value: dict, key: str) -> list[dict]:
    found = value.get(key)
    return [item for item in found[:3] if isinstance(item, dict)] if isinstance(found, list) else []


def _is_roam(value: dict) -> bool:
    marks = {"string", "edit-time", ":block/uid"}
    return "title" in value and any(marks & each.keys() for each in (*_items(value, "children"), value))


_ID_OF_DISCORD = re.compile(r"\d{17,20}")


def _is_channel(value: dict) -> bool:
    """Whether this is a channel of Slack or of Discord, or Discord's list of their names by their ids."""
    is_of_discord = bool(value) and all(map(_ID_OF_DISCORD.fullmatch, map(str, value)))
    is_of_slack = value.keys() >= {"id", "created", "members"}
    return is_of_discord or is_of_slack or bool(_ID_OF_DISCORD.fullmatch(str(value.get("id"))))


def _is_text_bundle(value: dict) -> bool:
    return "creatorIdentifier" in value or value.get("type") == "net.daringfireball.markdown"


_AS_MARKDOWN = "export it as Markdown"
_AS_MESSAGES = 'save its conversations as records with "messages"'
_AS_RECORD = 'save its text as .txt, or as a record with "text"'
# What an object looks like, and what to do.
_BY_SHAPE: list[tuple[str, Callable[[dict], bool], str]] = [
    ("a Roam export", _is_roam, _AS_MARKDOWN),
    ("a Logseq export", _looks("version", blocks="page-name"), _AS_MARKDOWN),
    ("a channel of Discord or Slack", _is_channel, "what was said there is in other files"),
    ("an export of Messenger or Instagram", _looks(messages="sender_name timestamp_ms"), _AS_MESSAGES),
    ("a Discord export", _looks("guild", "channel", "messages"), _AS_MESSAGES),
    ("a Google Keep note", _looks("textContent"), _AS_RECORD),
    ("a Google Keep note", _looks("listContent", "title"), _AS_RECORD),
    ("a Day One export", _looks("metadata", entries="creationDate"), "export it as plain text"),
    ("a Standard Notes backup", _looks(items="content_type"), "export the notes as plain text"),
    ("the settings of a text bundle", _is_text_bundle, "its text is in the file beside them"),
    ("a Simplenote export", lambda value: type(value.get("activeNotes")) is list, "use the .txt files of the export"),
]


def foreign_export(value: Any) -> str | None:
    """Returns which program's export a value of JSON looks like and what to do, such as "this looks like a Roam
    export; export it as Markdown"; None if it looks like no known one."""
    for name, looks_so, advice in _BY_SHAPE:
        if isinstance(value, dict) and looks_so(value):
            return f"this looks like {name}; {advice}"
    return None
