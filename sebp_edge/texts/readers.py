"""Files, folders, strings and records become documents, with a list of what was left out and why.

A new file format comes in through `READERS`: a function from a path to the contents found in it.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sebp_edge.errors import TextsError


class Completion(NamedTuple):
    """A prompt, and the completion to be learnt."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Chat messages, each with "role" and "content"; the assistant's are learnt."""

    messages: tuple[dict[str, str], ...]


Content = str | Completion | Conversation


@dataclass(frozen=True)
class Document:
    """One source text.

    Attributes:
        source: where it came from, for the report on screen; it is never saved.
        content: a plain text, a prompt with its completion, or a conversation.
    """

    source: str
    content: Content


@dataclass(frozen=True)
class LeftOut:
    """Something that was not used, and why."""

    source: str
    reason: str


@dataclass
class Reading:
    """What was read: the documents in a stable order, and what was left out."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


class Unreadable(Exception):
    """Why one file or record cannot be used; caught here and reported."""


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
            for position, content in enumerate(load()):
                if isinstance(content, Unreadable):
                    reading.left_out.append(LeftOut(source, str(content)))
                    continue
                content = _clean(content)
                key = json.dumps(content)
                if not _has_text(content):
                    reading.left_out.append(LeftOut(source, "empty"))
                elif key in seen:
                    reading.left_out.append(LeftOut(source, f"the same as {seen[key]}"))
                else:
                    seen[key] = source
                    reading.documents.append(Document(source if position == 0 else f"{source}#{position + 1}", content))
        except Unreadable as reason:
            reading.left_out.append(LeftOut(source, str(reason)))
    if not reading.documents:
        raise TextsError(_nothing_readable(reading.left_out))
    return reading


def _nothing_readable(left_out: list[LeftOut]) -> str:
    endings = " ".join(sorted(READERS))
    if not left_out:
        return (
            f"There is nothing to read: no files were found; give texts, or a folder with files that end in {endings}."
        )
    examples = "; ".join(f"{item.source}: {item.reason}" for item in left_out[:3])
    more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    return f"Nothing readable was found ({examples}{more}); files that end in {endings} can be read."


# ---------------------------------------------------------------------------------------------- where texts come from


def _sources(texts, left_out: list[LeftOut]) -> Iterator[tuple[str, Callable[[], Iterable[Content]]]]:
    """Yields (name, function that loads its contents) for everything in `texts`."""
    if isinstance(texts, (str, os.PathLike, dict)):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise TextsError(f"Texts must be strings, paths or records, or a list of these, but are a {_kind(texts)}.")
    for number, item in enumerate(texts, start=1):
        if isinstance(item, dict):
            yield f"record {number}", lambda item=item: [record_content(item)]
        elif isinstance(item, os.PathLike) or (isinstance(item, str) and _is_path(item)):
            for path, name in _files(Path(item).expanduser(), left_out):
                yield name, lambda path=path: _read_file(path)
        elif isinstance(item, str):
            yield f"text {number}", lambda item=item: [item]
        else:
            raise TextsError(f"Text {number} must be a string, a path or a record, but is a {_kind(item)}.")


def _kind(value) -> str:
    return type(value).__name__


def _is_path(text: str) -> bool:
    """Whether a string is meant as a path: it exists, or it cannot be anything else."""
    if "\n" in text or len(text) > 1024:
        return False
    try:
        if Path(text).expanduser().exists():
            return True
    except OSError:
        return False
    looks_like_one = text.startswith(("./", "../", "~/", "/", ".\\", "..\\")) or Path(text).suffix.lower() in READERS
    return looks_like_one and " " not in text.strip()


def _files(path: Path, left_out: list[LeftOut]) -> Iterator[tuple[Path, str]]:
    """The files of a folder with their names relative to it, sorted; hidden ones are left out and listed."""
    if not path.exists():
        raise TextsError(f"There is no file or folder {str(path)!r}; check the path.")
    if path.is_file():
        yield path, path.name
        return
    for folder, folders, files in os.walk(path, onerror=lambda error: _folder_failed(error, left_out)):
        here = Path(folder)
        for name in sorted(folders):
            if name.startswith("."):
                left_out.append(LeftOut(f"{_relative(here / name, path)}/", "hidden folder"))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.startswith("."):
                left_out.append(LeftOut(_relative(here / name, path), "hidden file"))
            else:
                yield here / name, _relative(here / name, path)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _folder_failed(error: OSError, left_out: list[LeftOut]) -> None:
    left_out.append(LeftOut(f"{Path(error.filename).name}/", f"cannot be opened: {error.strerror}"))


# ------------------------------------------------------------------------------------------------------- file formats


def _read_file(path: Path) -> Iterable[Content]:
    reader = READERS.get(path.suffix.lower())
    try:
        if not path.is_file():
            raise Unreadable("not a regular file")
        if reader is None:
            with path.open("rb") as file:
                binary = b"\0" in file.read(4096)
            raise Unreadable("binary file" if binary else f"{path.suffix or 'no ending'}: not a format read here")
        return reader(path)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def _decode(path: Path) -> str:
    """The file's text: UTF-8, or UTF-16 where a byte order mark says so."""
    data = path.read_bytes()
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in data and not utf16:
        raise Unreadable("binary file")
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start}); save it as UTF-8 to use it") from error


def _read_text(path: Path) -> Iterable[Content]:
    return [_decode(path)]


_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?:.*\n)*?\1[ \t]*(?:\n|\Z)")


def _read_markdown(path: Path) -> Iterable[Content]:
    return [_FRONT_MATTER.sub("", _newlines(_decode(path)), count=1)]


def _read_json(path: Path) -> Iterable[Content]:
    try:
        value = json.loads(_decode(path))
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON (line {error.lineno})") from error
    return _records(value if isinstance(value, list) else [value], "record")


def _read_jsonl(path: Path) -> Iterable[Content]:
    # Not splitlines(): a JSON string may hold U+2028, which that would break at.
    return _records((_parse_line(line) for line in _decode(path).split("\n") if line.strip()), "record")


def _parse_line(line: str):
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return Unreadable("not valid JSON")


def _read_csv(path: Path) -> Iterable[Content]:
    try:
        rows = list(csv.DictReader(io.StringIO(_decode(path), newline="")))
    except csv.Error as error:
        raise Unreadable(f"not valid CSV: {error}") from error
    if rows and not any(rows[0].keys() >= columns for columns in ({"text"}, {"prompt", "completion"})):
        raise Unreadable('no column "text", nor "prompt" and "completion"')
    return _records(rows, "row")


def _records(values: Iterable, word: str) -> Iterator[Content | Unreadable]:
    """The contents of many records; what is wrong with one of them is yielded in its place."""
    for number, value in enumerate(values, start=1):
        try:
            if isinstance(value, Unreadable):
                raise value
            yield value if isinstance(value, str) else record_content(value)
        except Unreadable as reason:
            yield Unreadable(f"{word} {number}: {reason}")


READERS: dict[str, Callable[[Path], Iterable[Content]]] = {
    ".txt": _read_text,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".rst": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
}


# ------------------------------------------------------------------------------------------------------------ records


def record_content(record) -> Content:
    """One record's content.

    Raises:
        Unreadable: it is neither `{"text"}`, `{"prompt", "completion"}` nor `{"messages"}`, or a value is no string.
    """
    if not isinstance(record, dict):
        raise Unreadable("neither a text nor a record")
    if "messages" in record:
        return Conversation(_messages(record["messages"]))
    if "prompt" in record and "completion" in record:
        return Completion(*(_string(record[key], key) for key in ("prompt", "completion")))
    if "text" in record:
        return _string(record["text"], "text")
    raise Unreadable('no "text", "prompt" and "completion", or "messages"')


def _string(value, key: str) -> str:
    if not isinstance(value, str):
        raise Unreadable(f'"{key}" is not a string')
    return value


def _messages(messages) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unreadable('"messages" is not a list of messages')
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise Unreadable('a message without "role" and "content" strings')
    if not any(message["role"] == "assistant" for message in messages):
        raise Unreadable("no message of the assistant to learn from")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _clean(content: Content) -> Content:
    """Unix newlines; a plain text loses blank space around it."""
    if isinstance(content, str):
        return _newlines(content).strip()
    if isinstance(content, Completion):
        return Completion(_newlines(content.prompt), _newlines(content.completion))
    return Conversation(tuple({**message, "content": _newlines(message["content"])} for message in content.messages))


def _has_text(content: Content) -> bool:
    if isinstance(content, Conversation):
        return any(message["content"].strip() for message in content.messages if message["role"] == "assistant")
    return bool((content.completion if isinstance(content, Completion) else content).strip())
