"""Reads files in the formats given by their endings.

To add a format, add its ending to `FORMATS` with a function from a path to the contents found in it.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sebp_edge.texts.documents import Content, Unreadable, printable, record_content, unix_newlines

# Size limit of a file, in bytes. The text of the largest file takes 1 to 2 GB of memory once it is tokenised.
MAX_FILE_SIZE = 64_000_000


def read_file(path: Path) -> Iterable[Content | Unreadable]:
    """Reads the contents of one file; an Unreadable takes the place of a faulty record.

    Raises:
        Unreadable: nothing in the file can be used.
    """
    reader = FORMATS.get(path.suffix.lower())
    try:
        if not path.is_file():
            raise Unreadable("not a regular file")
        size = path.stat().st_size
        if not size:
            # System files (/proc) report size 0 too; reading them may block or never end.
            raise Unreadable("empty")
        if reader is None:
            with path.open("rb") as file:
                binary = b"\0" in file.read(4096)
            ending = printable(path.suffix) or "(no ending)"
            raise Unreadable("binary file" if binary else f"unsupported file type {ending}")
        if size > MAX_FILE_SIZE:
            raise Unreadable(f"larger than {MAX_FILE_SIZE // 1_000_000} MB; split it to use it")
        return reader(path)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def text_size(path: Path) -> int:
    """Returns how many bytes `read_file` reads of a file; 0 if it refuses the ending or the size."""
    try:
        size = path.stat().st_size if path.suffix.lower() in FORMATS else 0
    except OSError:
        return 0
    return size if size <= MAX_FILE_SIZE else 0


def _decode(path: Path) -> str:
    """Returns the file's text, decoded from UTF-16 if it has that byte order mark, else from UTF-8."""
    data = path.read_bytes()
    # UTF-32's byte order mark can begin like UTF-16's.
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


# As in Pandoc, a mark before a blank line is a horizontal rule, not the start of front matter.
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?![ \t]*\n)(?:.*\n)*?\1[ \t]*(?:\n|\Z)")


def _read_markdown(path: Path) -> Iterable[Content]:
    return [_FRONT_MATTER.sub("", unix_newlines(_decode(path)), count=1)]


def _read_json(path: Path) -> Iterable[Content | Unreadable]:
    value = _parse_json(_decode(path))
    return _records(value if isinstance(value, list) else [value])


def _read_jsonl(path: Path) -> Iterable[Content | Unreadable]:
    # splitlines() would also split at U+2028, which a JSON string may contain.
    lines = enumerate(_decode(path).split("\n"), start=1)
    return _records(_parse_json(line, number) for number, line in lines if line.strip())


def _parse_json(text: str, first_line: int = 1):
    """Returns the parsed value, or an Unreadable with the reason of the failure."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return Unreadable(f"not valid JSON (line {first_line + error.lineno - 1})")
    except (ValueError, RecursionError):
        return Unreadable("JSON that is nested too deeply or has an overlong number")


def _read_csv(path: Path) -> Iterable[Content | Unreadable]:
    reader = csv.DictReader(io.StringIO(_decode(path), newline=""), restval="")
    try:
        rows = [Unreadable("more fields than columns") if None in row else row for row in reader]
    except csv.Error as error:
        raise Unreadable(f"not valid CSV: {error}") from error
    if not any(columns <= set(reader.fieldnames or ()) for columns in ({"text"}, {"prompt", "completion"})):
        raise Unreadable('no column "text", and no columns "prompt" and "completion"')
    return _records(rows)


def _records(values: Iterable) -> Iterator[Content | Unreadable]:
    """Yields the content of each record, or an Unreadable in place of a faulty one."""
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
