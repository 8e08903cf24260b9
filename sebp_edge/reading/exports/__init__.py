"""Reads chats, mails and notes as other programs export them.

Internal: import from `sebp_edge` or `sebp_edge.research`.

whatsapp, messengers, assistants   text of a file -> chats: WhatsApp; Telegram, Slack, Discord; ChatGPT, Claude
mail                               a mailbox or a mail -> mails
note_exports                       an export of notes, by Evernote or Joplin -> texts
objects                            the JSON of exports, within little memory
archives                           the files in a .zip

To add an export, add what its files look like to `EXPORTS`, or its ending to `BY_ENDING`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sebp_edge.reading import formats
from sebp_edge.reading.exports.assistants import read_chatgpt, read_claude
from sebp_edge.reading.exports.mail import read_mail, read_mailbox
from sebp_edge.reading.exports.messengers import (
    read_discord_csv,
    read_discord_json,
    read_slack_day,
    read_slack_users,
    read_telegram,
)
from sebp_edge.reading.exports.note_exports import read_evernote, read_jex
from sebp_edge.reading.exports.whatsapp import is_whatsapp, read_whatsapp
from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.formats.record_files import Read, is_json, read_json
from sebp_edge.reading.vaults import Vault
from sebp_edge.values.chats import Chat, Names
from sebp_edge.values.documents import Unreadable

# How much of a file is looked at to know what it is, in bytes.
BEGINNING = 100_000
# Size limit of an export, in bytes, which its owner can hardly split.
MAX_EXPORT = 500_000_000
# Mailboxes are read a mail at a time, so they may be this large, in bytes.
MAX_MAILBOX = 20_000_000_000

Part = Read | Chat | Names

# The endings of prose, behind which programs write JSON, too; and how that begins.
_PROSE = {"", ".txt", ".rst", ".org", ".mdx", ".html", ".htm", *formats.MARKDOWN}
_MAY_BE_JSON = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?\s*[\[{]")


_TELEGRAM_TYPES = "personal_chat|bot_chat|saved_messages|(?:private|public)_(?:group|supergroup|channel)"
# What the JSON of an export looks like, all of which must be in its beginning; and what reads it, from its text, the
# name of the file's folder and the name of the file.
EXPORTS = (
    ((r'"mapping"\s*:\s*\{', r'"(?:parent|current_node)"\s*:'), lambda text, *_: read_chatgpt(text)),
    ((r'"chat_messages"\s*:\s*\[', r'"uuid"\s*:'), lambda text, *_: read_claude(text)),
    ((rf'"type"\s*:\s*"(?:{_TELEGRAM_TYPES})"', r'"messages"\s*:\s*\['), lambda text, *_: read_telegram(text)),
    ((r'"date_unixtime"\s*:', r'"messages"\s*:\s*\['), lambda text, *_: read_telegram(text)),
    ((r'"personal_information"\s*:\s*\{\s*"user_id"',), lambda text, *_: read_telegram(text)),
    ((r'"type"\s*:\s*"message"', r'"ts"\s*:\s*"\d+\.\d+"'), read_slack_day),
    ((r'"id"\s*:\s*"[UW]\w+"', r'"profile"\s*:\s*\{'), lambda text, *_: read_slack_users(text)),
    ((r'"Timestamp"\s*:', r'"Contents"\s*:'), lambda text, folder, _: read_discord_json(text, folder)),
)
_DISCORD_TABLE = re.compile(r"\ufeff?ID,Timestamp,Contents,Attachments\r?\n")
# Readers of an open file by its ending, and how large it may be.
BY_ENDING = {
    ".mbox": (read_mailbox, MAX_MAILBOX),
    ".eml": (read_mail, formats.MAX_FILE_SIZE),
    ".enex": (read_evernote, MAX_EXPORT),
    ".jex": (read_jex, MAX_EXPORT),
}


def read_file(path: Path, vault: Vault | None = None) -> Iterator[Part]:
    """Yields the contents of one file, chats if it is an export of some, else as `formats.read_file` does."""
    ending = path.suffix.lower()
    try:
        kind = ".json" if ending in _PROSE and _is_json(path) else ending
        if ending in BY_ENDING:
            read, largest = BY_ENDING[ending]
            formats.refuse_larger(formats.size_of(path), largest)
            with path.open("rb") as file:
                yield from read(file)
        elif kind in (".txt", ".json", ".csv") and (export := _export_of(path, kind)):
            formats.refuse_larger(formats.size_of(path), MAX_EXPORT)
            yield from export(decode(path))
        else:
            yield from read_json(path) if kind != ending else formats.read_file(path, vault)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def _is_json(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > formats.MAX_FILE_SIZE:
        return False
    with path.open("rb") as file:
        if not _MAY_BE_JSON.match(file.read(1000).replace(b"\0", b"")):
            return False
    try:
        return is_json(decode(path))
    except Unreadable:
        return False


def _export_of(path: Path, kind: str) -> Callable[[str], Iterable[Part]] | None:
    """Returns the reader of an export; None if the file is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        beginning = file.read(BEGINNING).decode("utf-8", errors="replace")
    if kind == ".txt":
        return read_whatsapp if is_whatsapp(beginning) else None
    if kind == ".csv":
        return (lambda text: read_discord_csv(text, path.parent.name)) if _DISCORD_TABLE.match(beginning) else None
    for signs, read in EXPORTS:
        # In a text of a record the quotes would be escaped.
        if beginning.lstrip("\ufeff \r\n\t")[:1] in "[{" and all(re.search(sign, beginning) for sign in signs):
            return lambda text: read(text, path.parent.name, path.stem)
    return None
