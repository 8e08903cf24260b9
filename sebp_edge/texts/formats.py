"""File formats: what a file's ending says about how its contents are found.

A new format comes in through `FORMATS`: a function from a path to the contents found in it.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sebp_edge.texts.documents import Content, Unreadable, printable, record_content, unix_newlines

# Bytes of the largest file that is read; its text takes 1 to 2 GB of memory once it is tokenised.
MAX_FILE_SIZE = 64_000_000


def read_file(path: Path) -> Iterable[Content | Unreadable]:
    """The contents of one file; what is wrong with one of its records stands in that record's place.

    Raises:
        Unreadable: nothing in the file can be used.
    """
    reader = FORMATS.get(path.suffix.lower())
    try:
        if not path.is_file():
            raise Unreadable("not a regular file")
        size = path.stat().st_size
        if not size:
            # Files of the system (/proc) say so too, and may block or never end.
            raise Unreadable("empty")
        if reader is None:
            with path.open("rb") as file:
                binary = b"\0" in file.read(4096)
            ending = printable(path.suffix) or "no ending"
            raise Unreadable("binary file" if binary else f"{ending}: not a format read here")
        if size > MAX_FILE_SIZE:
            raise Unreadable(f"larger than {MAX_FILE_SIZE // 1_000_000} MB; split it to use it")
        return reader(path)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def text_size(path: Path) -> int:
    """Bytes of text that `read_file` reads of a file; none of what it leaves out for its ending or its size."""
    try:
        size = path.stat().st_size if path.suffix.lower() in FORMATS else 0
    except OSError:
        return 0
    return size if size <= MAX_FILE_SIZE else 0


def _decode(path: Path) -> str:
    """The file's text: UTF-8, or UTF-16 where a byte order mark says so."""
    data = path.read_bytes()
    # UTF-32's mark begins like UTF-16's.
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff")) and data[2:4] != b"\0\0"
    if b"\0" in data and not utf16:
        raise Unreadable("binary file")
    try:
        text = data.decode("utf-16" if utf16 else "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if utf16 else "UTF-8"
        raise Unreadable(f"not {encoding} (byte {error.start}); save it as UTF-8 to use it") from error
    if not text.strip():
        raise Unreadable("empty")
    return text


def _read_text(path: Path) -> Iterable[Content]:
    return [_decode(path)]


# A blank line after the opening mark makes it a horizontal rule, as in Pandoc.
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?![ \t]*\n)(?:.*\n)*?\1[ \t]*(?:\n|\Z)")


def _read_markdown(path: Path) -> Iterable[Content]:
    return [_FRONT_MATTER.sub("", unix_newlines(_decode(path)), count=1)]


def _read_json(path: Path) -> Iterable[Content | Unreadable]:
    value = _parse_json(_decode(path))
    return _records(value if isinstance(value, list) else [value])


def _read_jsonl(path: Path) -> Iterable[Content | Unreadable]:
    # Not splitlines(): a JSON string may hold U+2028, which that would break at.
    lines = enumerate(_decode(path).split("\n"), start=1)
    return _records(_parse_json(line, number) for number, line in lines if line.strip())


def _parse_json(text: str, first_line: int = 1):
    """The value, or the Unreadable that says why there is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return Unreadable(f"not valid JSON (line {first_line + error.lineno - 1})")
    except (ValueError, RecursionError):
        return Unreadable("JSON with a number too long, or nested too deep")


def _read_csv(path: Path) -> Iterable[Content | Unreadable]:
    reader = csv.DictReader(io.StringIO(_decode(path), newline=""), restval="")
    try:
        rows = [Unreadable("more fields than columns") if None in row else row for row in reader]
    except csv.Error as error:
        raise Unreadable(f"not valid CSV: {error}") from error
    if not any(columns <= set(reader.fieldnames or ()) for columns in ({"text"}, {"prompt", "completion"})):
        raise Unreadable('no column "text", nor "prompt" and "completion"')
    return _records(rows)


def _records(values: Iterable) -> Iterator[Content | Unreadable]:
    """The contents of many records; what is wrong with one of them is yielded in its place."""
    for value in values:
        try:
            yield value if isinstance(value, (str, Unreadable)) else record_content(value)
        except Unreadable as reason:
            yield reason


FORMATS: dict[str, Callable[[Path], Iterable[Content | Unreadable]]] = {
    ".txt": _read_text,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".rst": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
}
