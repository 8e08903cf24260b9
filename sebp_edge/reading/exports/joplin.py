"""Reads Joplin's export of all notes in one file (.jex), an archive (tar) of the files that its RAW export has."""

import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from sebp_edge.reading import formats
from sebp_edge.reading.formats.encodings import decode_bytes
from sebp_edge.reading.formats.joplin_notes import ENCRYPTED, NO_NOTE
from sebp_edge.reading.formats.notes import joplin_note
from sebp_edge.values.documents import NotRead, Unreadable, unix_newlines

_DAMAGED = "damaged, or not a Joplin export"
_COUNTED = {
    NO_NOTE: "notebooks, tags and what else Joplin keeps beside notes",
    ENCRYPTED: "notes that Joplin has encrypted; export them again with encryption off",
}


def read_jex(file: BinaryIO) -> Iterator[str | Unreadable | NotRead]:
    """Yields the text of each note, and what was not read. Nothing after a fault is read.

    Raises:
        Unreadable: the file is damaged at its beginning, or holds no notes.
    """
    left_out: Counter[str] = Counter()
    num_notes = 0
    try:
        for name, data in _files(file):
            if data is None or not name.endswith(".md") or "/" in name:
                left_out["attachments and other files"] += 1
                continue
            try:
                content, *not_read = joplin_note(unix_newlines(decode_bytes(data)))
            except Unreadable as reason:
                if reason.reason in _COUNTED:
                    left_out[_COUNTED[reason.reason]] += 1
                    continue
                content, not_read = reason.with_traceback(None), []
            num_notes += 1
            for part in not_read:
                kind, _, number = part.reason.rpartition(": ")
                left_out[kind or part.reason] += int(number.replace(",", "")) if kind else 1
            yield content
    except (tarfile.TarError, ValueError, EOFError) as error:
        if not num_notes:
            raise Unreadable(_DAMAGED) from error
        yield Unreadable(f"damaged after {num_notes:,} notes")
    yield from (NotRead(f"{kind}: {number:,}") for kind, number in sorted(left_out.items()))


def _files(file: BinaryIO) -> Iterator[tuple[str, bytes | None]]:
    """Yields the name and content of each file; None instead of a content that is too large, a link or the like."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        at = -1
        while member := archive.next():
            if archive.offset <= at:
                raise ValueError  # It would go round in circles.
            at = archive.offset
            archive.members.clear()  # Else it keeps what it knows of each file.
            if member.isdir():
                continue
            is_file = member.isreg() and not member.issparse() and member.size <= formats.MAX_FILE_SIZE
            is_note = is_file and member.name.endswith(".md")
            data = archive.extractfile(member).read() if is_note else None
            if is_note and len(data) < member.size:
                raise EOFError
            yield member.name, data
