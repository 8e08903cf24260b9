"""Reads files, folders, strings and records into documents, and lists what was left out and why."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sebp_edge.errors import MachineError, TextsError
from sebp_edge.texts.documents import (
    Content,
    Document,
    LeftOut,
    Unreadable,
    clean_content,
    num_bytes,
)
from sebp_edge.texts.folders import Folder, expand_user, find_files
from sebp_edge.texts.formats import FORMATS, read_file, text_size
from sebp_edge.texts.records import record_content
from sebp_edge.units import gigabytes

# Peak memory per byte of text while it is read, compared and tokenised: the maximum over notes in one file and in 2,000
# files, and records of one sentence.
MEMORY_PER_BYTE = 45


@dataclass
class Reading:
    """The documents that were read, in a stable order, and what was left out.

    Attributes:
        num_equal: how many documents were left out since they equal others.
    """

    documents: list[Document] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    num_equal: int = 0


def read_texts(texts, memory: int | None = None) -> Reading:
    """Reads a user's texts.

    Args:
        texts: a text as a string, the `pathlib.Path` of a file or folder, a `Folder` with patterns, a record
            (`{"text"}`, `{"prompt", "completion"}`, `{"messages"}`, or as `record_content` takes), or an iterable of
            these. Strings are texts, never paths. What was read already is returned as it is.
        memory: the bytes of memory that reading and tokenising the texts may take; None for no limit.

    Raises:
        TextsError: a path does not exist, an item has another type, nothing readable was found, or `texts` is a string
            that names an existing file or folder.
        MachineError: the texts would take more than `memory`; nothing was read but .docx and .pdf files before.
    """
    if isinstance(texts, Reading):
        _refuse_too_large(sum(num_bytes(document.content) for document in texts.documents), memory)
        return texts
    reading = Reading()
    sources = list(_sources(texts, reading.left_out))
    size = sum(source.size for source in sources)
    _refuse_too_large(size, memory)
    seen: dict[bytes, str] = {}
    for source in sources:
        try:
            contents = list(source.load()) or [Unreadable("empty")]
        except Unreadable as reason:
            contents = [reason]
        if not source.size:
            # Unpacked texts have a size only now.
            size += sum(num_bytes(content) for content in contents if not isinstance(content, Unreadable))
            _refuse_too_large(size, memory)
        for position, content in enumerate(contents, start=1):
            name = source.name if len(contents) == 1 else f"{source.name}#{position}"
            try:
                content = clean_content(content)
                if (key := _digest(content)) in seen:
                    reading.num_equal += 1
                    raise Unreadable(f"the same as {seen[key]}")
            except Unreadable as reason:
                reading.left_out.append(LeftOut(name, str(reason)))
            else:
                seen[key] = name
                reading.documents.append(Document(name, content))
    if not reading.documents:
        raise TextsError(_nothing_readable(reading.left_out))
    return reading


def _refuse_too_large(size: int, memory: int | None) -> None:
    if memory is not None and MEMORY_PER_BYTE * size > memory:
        raise MachineError(
            f"Reading these texts would take more than the {gigabytes(max(0, memory))} of memory left for them; "
            "give fewer texts or raise the memory budget."
        )


def _digest(content: Content) -> bytes:
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _nothing_readable(left_out: list[LeftOut]) -> str:
    endings = " ".join(sorted(FORMATS))
    if not left_out:
        return f"Nothing to read: no files were found; give texts, or a folder with files that end in {endings}."
    examples = "; ".join(f"{item.source}: {item.reason}" for item in left_out[:3])
    more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    return f"Nothing readable was found ({examples}{more}); supported files end in {endings}."


# ---------------------------------------------------------------------------------------------- where texts come from


class _Source(NamedTuple):
    """A file, a string or a record.

    Attributes:
        name: its name in the report.
        size: the size of its text, in bytes.
        load: reads its contents; raises Unreadable if it cannot be used.
    """

    name: str
    size: int
    load: Callable[[], Iterable[Content | Unreadable]]


def _sources(texts, left_out: list[LeftOut]) -> Iterator[_Source]:
    """Yields the sources in `texts` without reading them."""
    if isinstance(texts, str) and (path := _existing_path(texts)):
        kind = "folder" if path.is_dir() else "file"
        raise TextsError(
            f"The string {texts!r} is the path of a {kind}; pass Path({texts!r}) to train on the {kind}, or "
            f"[{texts!r}] to train on the string itself."
        )
    if isinstance(texts, (str, Path, Folder, dict)):
        texts = [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, bytearray)):
        raise TextsError(
            f"Texts must be strings, pathlib.Paths or records, or a list of these, but are of type {_kind(texts)}."
        )
    for number, item in enumerate(texts, start=1):
        if isinstance(item, str):
            yield _source_of(f"text {number}", item)
        elif isinstance(item, dict):
            yield _record_source(f"record {number}", item)
        elif isinstance(item, Folder | Path):
            yield from _folder_sources(item if isinstance(item, Folder) else Folder(item), left_out)
        else:
            raise TextsError(
                f"Text {number} must be a string, a pathlib.Path or a record, but is of type {_kind(item)}."
            )


def _kind(value) -> str:
    return type(value).__name__


def _source_of(name: str, content: Content) -> _Source:
    return _Source(name, num_bytes(content), lambda: [content])


def _record_source(name: str, record: dict) -> _Source:
    try:
        return _source_of(name, record_content(record))
    except Unreadable as reason:
        return _Source(name, 0, partial(iter, [reason]))


def _existing_path(text: str) -> Path | None:
    """Returns the file or folder that a string names, if it exists."""
    try:
        path = expand_user(Path(text))
        return path if text and path.exists() else None
    except (OSError, ValueError):
        return None  # The name is too long, the folder cannot be opened, or the path is not valid.


def _folder_sources(folder: Folder, left_out: list[LeftOut]) -> Iterator[_Source]:
    for file in find_files(folder, lambda name, reason: left_out.append(LeftOut(name, reason))):
        yield _Source(file.name, text_size(file.path), partial(read_file, file.path, file.vault))
