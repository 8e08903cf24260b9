"""Reads what Joplin's RAW export adds to a note: lines such as "id: ..." and "latitude: ..." at the end of its file."""

import re

from sebp_edge.texts.documents import Unreadable

_METADATA = re.compile(r"(?:\A|\n\n)((?:[a-z_]{2,40}:(?: [^\n]*)?\n)*type_: (\d{1,2}))\s*\Z")
# In characters.
_LONGEST = 100_000
_ID = re.compile(r"^id: \w+$", re.MULTILINE)
# Keys that tell its metadata from a user's own lines.
_OWN = re.compile(r"^(?:parent_id|note_id|created_time|user_created_time|encryption_applied|mime): ", re.MULTILINE)
_ENCRYPTED = re.compile(r"^encryption_applied: 1$", re.MULTILINE)
_NOTE = "1"


def metadata_begin(text: str) -> int | None:
    """Returns where Joplin's metadata begins at the end of a text; None if there are none.

    Raises:
        Unreadable: the file is an encrypted note, or something else than a note, such as a tag.
    """
    tail = max(0, len(text) - _LONGEST)
    found = _METADATA.search(text, tail) if "\ntype_: " in text[tail:] else None
    if not (found and _ID.search(found[1]) and _OWN.search(found[1])):
        return None
    if found[2] != _NOTE:
        raise Unreadable("what Joplin keeps beside its notes, such as a notebook or a tag")
    if _ENCRYPTED.search(found[1]):
        raise Unreadable("encrypted by Joplin; export it again with encryption off")
    return found.start()
