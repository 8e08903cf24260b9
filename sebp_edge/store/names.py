"""The names of adapters, and the names of their folders.

A name may be any text. One of plain letters and digits names its folder as it is; of any other, the bytes that are not
plain are percent-encoded: "my notes" is in the folder "my%20notes".
"""

import re
import unicodedata
from urllib.parse import unquote

from sebp_edge.errors import AdapterError

_MAX_CHARACTERS = 64
# Folder names have up to 255 bytes on most disks; those of removed adapters are longer than the adapter's.
_MAX_FOLDER = 234
# Windows reserves some names for devices, whatever follows their first dot.
_RESERVED = r"(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$)"
_PLAIN = re.compile(rf"(?!{_RESERVED})(?!.*\.\.)[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")


def check_name(name: str) -> str:
    """Returns a name in Unicode's form NFC, so that "é" is one character however it was typed; refuses others."""
    normal = unicodedata.normalize("NFC", name)
    reason = None
    if not normal or len(normal) > _MAX_CHARACTERS:
        reason = f"use 1 to {_MAX_CHARACTERS} characters"
    elif not normal.isprintable() or normal != normal.strip():
        reason = "leave out line breaks, control characters, and spaces at the ends"
    elif re.search(r"[/\\]", normal) or normal[0] in ".~-":
        reason = "it could be mistaken for a folder or an option; use no slashes, and do not begin with '.', '~' or '-'"
    elif len(_encoded(normal)) > _MAX_FOLDER:
        reason = f"it is too long for a folder's name; use up to {_MAX_FOLDER // 9} characters of this script"
    if reason:
        raise AdapterError(f"Invalid adapter name {name[:_MAX_CHARACTERS]!r}: {reason}.")
    return normal


def is_plain(name: str) -> bool:
    """Whether a name, as it is, can be the name of a file anywhere."""
    return len(name) <= _MAX_CHARACTERS and bool(_PLAIN.fullmatch(name))


def folder_of(name: str) -> str:
    """Returns the name of an adapter's folder."""
    return _encoded(check_name(name))


def name_of(folder: str) -> str | None:
    """Returns the name of the adapter in a folder of that name; None if it is no adapter's folder."""
    try:
        name = unquote(folder, errors="strict")
        return name if folder_of(name) == folder else None
    except (AdapterError, UnicodeError):
        return None


def _encoded(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    encoded = re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"%%%02X" % byte[0][0], name.encode()).decode()
    # A name that Windows reserves may have plain characters only.
    return encoded if "%" in encoded else f"%{ord(name[0]):02X}{name[1:]}"
