"""Reads files of records: .json, .jsonl and .csv."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from sebp_edge.texts.documents import Content, Unreadable
from sebp_edge.texts.foreign import foreign_export
from sebp_edge.texts.formats.encodings import decode
from sebp_edge.texts.records import prompt_and_completion, record_content


def read_json(path: Path) -> Iterable[Content | Unreadable]:
    """Reads a JSON file: a text, a record, or a list of these."""
    value = _parse_json(decode(path))
    return _contents(value if isinstance(value, list) else [value])


def read_jsonl(path: Path) -> Iterable[Content | Unreadable]:
    """Reads a file with a text or a record as JSON in each line."""
    # splitlines() would also split at U+2028, which a JSON string may contain.
    lines = enumerate(decode(path).split("\n"), start=1)
    return _contents(_parse_json(line, number) for number, line in lines if line.strip())


def _parse_json(text: str, first_line: int = 1):
    """Returns the parsed value, or an Unreadable with the reason of the failure."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return Unreadable(f"not valid JSON (line {first_line + error.lineno - 1})")
    except (ValueError, RecursionError):
        return Unreadable("JSON that is nested too deeply or has an overlong number")


def read_csv(path: Path) -> Iterable[Content | Unreadable]:
    """Reads a table with a record in each row.

    Raises:
        Unreadable: it is not valid, or its header names no text, and no prompt with its completion.
    """
    reader = csv.DictReader(io.StringIO(decode(path), newline=""), restval="")
    try:
        rows = [Unreadable("more fields than columns") if None in row else row for row in reader]
    except csv.Error as error:
        raise Unreadable(f"not valid CSV: {error}") from error
    names = {name.strip().lower() for name in reader.fieldnames or ()}
    if "text" not in names and prompt_and_completion(names) is None:
        raise Unreadable('no column "text", and no columns "prompt" and "completion"')
    return _contents(rows)


def _contents(values: Iterable) -> Iterator[Content | Unreadable]:
    """Yields the content of each record, or an Unreadable in place of a faulty one."""
    for value in values:
        try:
            yield value if isinstance(value, (str, Unreadable)) else record_content(value)
        except Unreadable as reason:
            looks = foreign_export(value)
            yield Unreadable(looks) if looks else reason
