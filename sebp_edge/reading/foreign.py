"""Names files that are not read, and exports of other programs, each with what to do about it."""

import re
from pathlib import PurePath
from typing import Any

# What a file is by its ending, and what to do; several endings are apart by blanks.
_BY_ENDING = {
    ".textpack .bear2bk": ("a Bear archive", "export the notes as Markdown"),
    ".one .onepkg .onetoc2": ("a OneNote file", "export its pages as Word files (.docx)"),
    ".mdx .qmd .rmd": ("Markdown with code (MDX, Quarto or R)", "save it as .md"),
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


def _has(value: dict, path: str) -> bool:
    """Whether an object has a key; with a slash, whether one of the first objects in the list under it has another."""
    key, _, inner = path.partition("/")
    if not inner:
        return key in value
    items = value.get(key)
    return isinstance(items, list) and any(isinstance(item, dict) and inner in item for item in items[:3])


_ID_OF_DISCORD = re.compile(r"\d{17,20}")
_AS_MARKDOWN = "export it as Markdown"
_AS_MESSAGES = 'save its conversations as records with "messages"'
_CHANNEL = ("a channel of Discord or Slack", "what was said there is in other files")
# The keys that an object of an export has, see `_has`; what it is, and what to do.
_BY_KEYS = {
    "title children/string": ("a Roam export", _AS_MARKDOWN),
    "title children/:block/uid": ("a Roam export", _AS_MARKDOWN),
    "title edit-time": ("a Roam export", _AS_MARKDOWN),
    "version blocks/page-name": ("a Logseq export", _AS_MARKDOWN),
    "id created members": _CHANNEL,
    "messages/sender_name messages/timestamp_ms": ("an export of Messenger or Instagram", _AS_MESSAGES),
    "guild channel messages": ("a Discord export", _AS_MESSAGES),
    "textContent": ("a Google Keep note", 'save its text as .txt, or as a record with "text"'),
    "title listContent": ("a Google Keep note", 'save its text as .txt, or as a record with "text"'),
    "metadata entries/creationDate": ("a Day One export", "export it as plain text"),
    "items/content_type": ("a Standard Notes backup", "export the notes as plain text"),
    "creatorIdentifier": ("the settings of a text bundle", "its text is in the file beside them"),
    "type transient version": ("the settings of a text bundle", "its text is in the file beside them"),
    "activeNotes trashedNotes": ("a Simplenote export", "use the .txt files of the export"),
}


def foreign_export(value: Any) -> str | None:
    """Returns which program's export a value of JSON looks like and what to do, such as "this looks like a Roam
    export; export it as Markdown"; None if it looks like no known one."""
    if not isinstance(value, dict):
        return None
    found = next((entry for keys, entry in _BY_KEYS.items() if all(_has(value, key) for key in keys.split())), None)
    # Of Discord are an id that is a number, and a list of names by such ids.
    if value and (
        all(map(_ID_OF_DISCORD.fullmatch, map(str, value))) or _ID_OF_DISCORD.fullmatch(str(value.get("id")))
    ):
        found = found or _CHANNEL
    return found and f"this looks like {found[0]}; {found[1]}"
