"""Files, folders, strings and records become documents, with a list of what was left out and why."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sebp_edge.errors import TextsError
from sebp_edge.texts.documents import Content, Document, LeftOut, Unreadable, clean_content, record_content
from sebp_edge.texts.formats import FORMATS, read_file


@dataclass
class Reading:
    """What was read: the documents in a stable order, and what was left out."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def read_texts(texts) -> Reading:
    """Reads whatever a user calls their texts.

    Args:
        texts: a text, the path of a file or folder, a `{"text"}`, `{"prompt", "completion"}` or `{"messages"}` record,
            or an iterable of these. A string that names an existing file or folder is a path.

    Raises:
        TextsError: a path does not exist, something is of another type, or nothing readable was found.
    """
    reading = Reading()
    seen: dict[str, str] = {}
    for source, load in _sources(texts, reading.left_out):
        try:
            contents = list(load()) or [Unreadable("empty")]
        except Unreadable as reason:
            contents = [reason]
        for position, content in enumerate(contents, start=1):
            name = source if len(contents) == 1 else f"{source}#{position}"
            try:
                content = clean_content(content)
                if (key := json.dumps(content)) in seen:
                    raise Unreadable(f"the same as {seen[key]}")
            except Unreadable as reason:
                reading.left_out.append(LeftOut(name, str(reason)))
            else:
                seen[key] = name
                reading.documents.append(Document(name, content))
    if not reading.documents:
        raise TextsError(_nothing_readable(reading.left_out))
    return reading


def _nothing_readable(left_out: list[LeftOut]) -> str:
    endings = " ".join(sorted(FORMATS))
    if not left_out:
        return (
            f"There is nothing to read: no files were found; give texts, or a folder with files that end in {endings}."
        )
    examples = "; ".join(f"{item.source}: {item.reason}" for item in left_out[:3])
    more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    return f"Nothing readable was found ({examples}{more}); files that end in {endings} can be read."


# ---------------------------------------------------------------------------------------------- where texts come from


def _sources(texts, left_out: list[LeftOut]) -> Iterator[tuple[str, Callable[[], Iterable[Content | Unreadable]]]]:
    """Yields (name, function that loads its contents) for everything in `texts`."""
    if isinstance(texts, (str, os.PathLike, dict)):
        texts = [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, bytearray)):
        raise TextsError(
            f"Texts must be strings, paths or records, or a list of these, but are of type {_kind(texts)}."
        )
    for number, item in enumerate(texts, start=1):
        if isinstance(item, dict):
            yield f"record {number}", lambda item=item: [record_content(item)]
        elif isinstance(item, os.PathLike) or (isinstance(item, str) and _is_path(item)):
            for path, name in _files(_expanded(item), left_out):
                yield name, lambda path=path: read_file(path)
        elif isinstance(item, str):
            yield f"text {number}", lambda item=item: [item]
        else:
            raise TextsError(f"Text {number} must be a string, a path or a record, but is of type {_kind(item)}.")


def _kind(value) -> str:
    return type(value).__name__


def _is_path(text: str) -> bool:
    """Whether a string is meant as a path: it exists, or it cannot be anything else."""
    if not text.strip() or "\n" in text or len(text) > 255:
        return False
    try:
        if _expanded(text).exists():
            return True
    except OSError:
        pass  # Too long for a name, or in a folder that may not be opened.
    looks_like_one = "/" in text or "\\" in text or Path(text).suffix.lower() in FORMATS
    return looks_like_one and " " not in text.strip()


def _expanded(path: str | os.PathLike) -> Path:
    """The path with its `~` replaced, unless there is no such user: "~10 cm of snow" is a text."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _files(path: Path, left_out: list[LeftOut]) -> Iterator[tuple[Path, str]]:
    """The files of a folder with their names relative to it, sorted; what is not looked into is listed as left out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise TextsError(f"There is no file or folder {str(path)!r}; check the path.") from error
    except OSError as error:
        raise TextsError(f"{str(path)!r} cannot be opened: {error.strerror}.") from error
    if not path.is_dir():
        yield path, _relative(path, path.parent)
        return

    def leave_out(folder: Path, reason: str) -> None:
        left_out.append(LeftOut(f"{_relative(folder, path)}/", reason))

    def failed(error: OSError) -> None:
        leave_out(Path(error.filename), f"cannot be opened: {error.strerror}")

    for folder, folders, files in os.walk(path, onerror=failed):
        here = Path(folder)
        folders.sort()
        for name in folders.copy():
            if name.startswith("."):
                leave_out(here / name, "hidden folder")
                folders.remove(name)
            elif (here / name).is_symlink():
                # Followed, it could lead round in a circle or out of what was given.
                leave_out(here / name, "link to a folder; give that folder itself")
        for name in sorted(files):
            if name.startswith("."):
                left_out.append(LeftOut(_relative(here / name, path), "hidden file"))
            else:
                yield here / name, _relative(here / name, path)


def _relative(path: Path, root: Path) -> str:
    # A name on disk need not be UTF-8; the report must be.
    return path.relative_to(root).as_posix().encode(errors="replace").decode()
