"""Reads files of records: .json, .jsonl, .csv and .tsv.

JSON is read one record at a time, so that a file takes the memory of its texts.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.records import prompt_and_completion, read_record
from sebp_edge.values.documents import Content, NotRead, Unreadable

# Number of records in a file. More of them would take longer than any training that they are for.
MAX_RECORDS = 1_000_000
DELIMITERS = (",", ";", "\t")
# The length of a field that csv accepts, in characters: more than any file has.
MAX_FIELD = 2**31 - 1

_MAX_FAULTS = 10

Read = Content | Unreadable | NotRead


def read_json(path: Path) -> Iterable[Read]:
    """Reads a file of JSON: a list of texts and records, or one text or record after another, in lines or not."""
    return read_records(_values(decode(path)))


def read_csv(path: Path) -> Iterable[Read]:
    """Reads a table with a record in each row; columns are separated by commas, semicolons or tabs."""
    text = decode(path)
    with long_fields():
        return list(read_records(_records_of_table(text)))


def read_records(values: Iterable) -> Iterator[Read]:
    """Yields the content of each record, or an Unreadable in place of a faulty one; then what was read in part."""
    unread: Counter[str] = Counter()
    # Faults of one kind are one object after a while, since there may be many.
    faults: defaultdict[str, list[Unreadable]] = defaultdict(list)
    for number, value in enumerate(values):
        if number == MAX_RECORDS:
            raise Unreadable(f"more than {MAX_RECORDS:,} records; split it to use it")
        content = value
        if not isinstance(value, str | Unreadable):
            try:
                content, names = read_record(value)
            except Unreadable as reason:
                content = reason.with_traceback(None)
            else:
                unread.update(names)
        if isinstance(content, Unreadable):
            alike = faults[content.reason]
            if len(alike) < _MAX_FAULTS:
                alike.append(content)
            content = alike[-1]
        yield content
    if unread:
        names = ", ".join([f'"{name}"' for name in sorted(unread) if name] + ["others"] * ("" in unread))
        most = max(unread.values())
        yield NotRead(f"fields of records with words that are not read: {names} (in {most:,} records)")


# ---------------------------------------------------------------------------------------------------------------- JSON

_BLANK = re.compile(r"[ \t\r\n]*")
# Where a record begins if each has a line, or is indented but for its first and last line.
_NEXT_RECORD = re.compile(r"\n(?=[^\s\]}])")


def _object(pairs: list[tuple]):
    found = dict(pairs)
    return found if len(found) == len(pairs) else Unreadable("an object that has a key twice")


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def is_json(text: str) -> bool:
    """Returns whether a text is nothing but objects and texts, in a list or one after another."""
    kinds = set()
    for value in _values(text):
        kinds.add(type(value))
        if not kinds <= {dict, str}:
            return False
    return dict in kinds


def _values(text: str) -> Iterator:
    """Yields the values in a text; for a faulty one, an Unreadable."""
    begin = _BLANK.match(text).end()
    if text.startswith("[", begin) and not _is_first_of_lines(text, begin):
        yield from values_of_list(text, begin)
    else:
        yield from _values_in_turn(text, begin)


def _is_first_of_lines(text: str, begin: int) -> bool:
    """Whether a list ends in its line, and others follow."""
    end = text.find("\n", begin)
    if end < 0 or _BLANK.match(text, end).end() == len(text):
        return False
    return _parsed(text[begin:end])[1] is None


def values_of_list(text: str, begin: int, decoder: json.JSONDecoder = _DECODER) -> Iterator:
    """Yields the values of the list that begins here. Nothing after a fault is read."""
    at, is_first = _BLANK.match(text, begin + 1).end(), True
    while not (is_first and text.startswith("]", at)):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield json_fault(error)
            return
        yield value
        at, is_first = _BLANK.match(text, at).end(), False
        if not text.startswith(",", at):
            break
        at = _BLANK.match(text, at + 1).end()
    end = _BLANK.match(text, at + 1).end()
    if not text.startswith("]", at) or end < len(text):
        yield json_fault(json.JSONDecodeError("", text, end if text.startswith("]", at) else at))


def _values_in_turn(text: str, at: int) -> Iterator:
    """Yields one value after another. After a faulty one, reading goes on where the next record begins."""
    line, counted, may_be_flat = 1, 0, True
    while at < len(text):
        following = _NEXT_RECORD.search(text, at)
        last, end = following.span() if following else (len(text), len(text))
        values, fault = _parsed(text[at:last])
        if fault is not None and may_be_flat and (flat := _flat_value(text, at)):
            value, end = flat
            values, fault = [value], None
        if fault is not None:
            # A failure costs a look at the whole text, so there is only one.
            may_be_flat = False
            # Lines are counted from the fault before.
            line, counted = line + text.count("\n", counted, at), at
            yield Unreadable(fault.reason, fault.line and line + fault.line - 1)
        yield from values
        at = end


def _parsed(text: str) -> tuple[list, Unreadable | None]:
    """Returns the values in a text, or no values and the fault in it."""
    try:
        return _decode_all(text), None
    except (ValueError, RecursionError) as error:
        return [], json_fault(error)


def _flat_value(text: str, at: int) -> tuple[Any, int] | None:
    """Returns a value in several lines that are not indented, and where the next one begins; None if it is faulty."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    following = _BLANK.match(text, end).end()
    return (value, following) if following == len(text) or "\n" in text[end:following] else None


def _decode_all(text: str) -> list:
    """Returns the values in a text, each in lines of its own; objects may share a line.

    Raises:
        ValueError, RecursionError: one is faulty.
    """
    values, at = [], 0
    while at < len(text):
        value, end = _DECODER.raw_decode(text, at)
        values.append(value)
        at = _BLANK.match(text, end).end()
        if at < len(text) and "\n" not in text[end:at] and not (isinstance(value, dict) and text[at] == "{"):
            raise json.JSONDecodeError("Extra data", text, at)
    return values


def json_fault(error: Exception) -> Unreadable:
    """Returns why a text is not JSON that can be used; the error is a ValueError or a RecursionError."""
    if isinstance(error, json.JSONDecodeError):
        return Unreadable("not valid JSON", error.lineno)
    return Unreadable("JSON that is nested too deeply or has an overlong number")


# ----------------------------------------------------------------------------------------------------------------- CSV

# Excel writes the separator into a line before the header.
_SEPARATOR = re.compile(r"sep=([,;\t])\r?\n")
_LIMIT = Lock()


# The lines of a table, whose ends csv must see.
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")


def _records_of_table(text: str) -> Iterator[dict[str, str] | Unreadable]:
    """Yields the rows of a table as records; for a faulty one, an Unreadable."""
    separator = _SEPARATOR.match(text)
    begin = separator.end() if separator else 0
    for delimiter in (separator[1],) if separator else DELIMITERS:
        rows = _rows(text, begin, delimiter)
        names = next(rows, None)
        known = {name.strip().lower() for name in names} if isinstance(names, list) else set()
        if "text" in known or prompt_and_completion(known):
            break
    else:
        raise Unreadable('no column "text", and no columns "prompt" and "completion"')
    if max(Counter(filter(None, (name.strip().lower() for name in names))).values()) > 1:
        raise Unreadable("two columns of one name; rename one")
    for row in rows:
        if isinstance(row, Unreadable):
            yield row
        elif len(row) > len(names):
            yield Unreadable("more fields than columns")
        else:
            yield dict(zip_longest(names, row, fillvalue=""))


def _rows(text: str, begin: int, delimiter: str) -> Iterator[list[str] | Unreadable]:
    """Yields the rows that are not blank; for one with a quote in the wrong place or without an end, an Unreadable."""
    reader = csv.reader((line[0] for line in _LINE.finditer(text, begin)), delimiter=delimiter, strict=True)
    while True:
        begun = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield Unreadable("a row whose quotes are not valid CSV", begun)
        else:
            if row:
                yield row


@contextmanager
def long_fields() -> Iterator[None]:
    """Context in which csv reads fields of any length; its limit belongs to the whole process."""
    with _LIMIT:
        before = csv.field_size_limit(MAX_FIELD)
        try:
            yield
        finally:
            csv.field_size_limit(before)
