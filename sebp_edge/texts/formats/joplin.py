"""Reads what Joplin's RAW export adds to a note: lines such as "id: ..." and "latitude: ..." at the end of its file."""

import re

from sebp_edge.texts.documents import Unreadable

_METADATA = re.compile(r"(?:\A|\n\n)((?:[a-z_]{2,40}:(?: [^\n]*)?\n)*type_: (\d{1,2}))\s*\Z")
# In characters.
_LONGEST = 100_000
_ID = re.compile(r"^id: [0-9a-f]{32}$", re.MULTILINE)
_ENCRYPTED = re.compile(r"^encryption_applied: 1$", re.MULTILINE)
_NOTE = "1"


def metadata_begin(text: str) -> int | None:
    """Returns where Joplin's metadata begins at the end of a text; None if there are none.

    Raises:
        Unreadable: the file is an encrypted note, or something else than a note, such as a tag.
    """
    tail = max(0, len(text) - _LONGEST)
    found = _METADATA.search(text, tail) if "\ntype_: " in text[tail:] else None
    if not found or not _ID.search(found[1]):
        return None
    if found[2] != _NOTE:
        raise Unreadable("what Joplin keeps beside its notes, such as a notebook or a tag")
    if _ENCRYPTED.search(found[1]):
        raise Unreadable("encrypted by Joplin; export it again with encryption off")
    return found.start()
