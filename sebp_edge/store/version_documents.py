"""The file documents.json of a version: its documents and how they were split, without their texts; imports no numpy.

It has one object for each document, with the attributes of `KnownDocument`. The salt of the hashes is that of all
versions of an adapter. The next version draws its splits from those in it.
"""

import base64
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sebp_edge.basics.files import read_json
from sebp_edge.errors import AdapterError
from sebp_edge.store.salt import salt_of
from sebp_edge.store.saved import DOCUMENTS
from sebp_edge.values.remembered import FEW_FOLDS, MANY_FOLDS, ROLES, SKETCH_SIZE, SPLITS, KnownDocument, SplitHistory

_FORMAT, _FORMAT_OF_MANY_FOLDS = 3, 4
# Those before had a column for each value. Their numbers were packed in base64, and choices in one character each.
_PACKED_FORMATS = (1, 2)
_PACKED_SPLITS = ("train", "validation", "test")
_PACKED_ROLES = (*_PACKED_SPLITS, "fold 1", "fold 2", "fold 3")
_PACKED_SKETCH_SIZE = 64
# The size limit of the file, in bytes; a long document takes 900.
_MAX_BYTES = 2**29
_HASH = re.compile("[0-9a-f]{16}")
_NAMES = [field.name for field in fields(KnownDocument)]


class Entry(NamedTuple):
    """What the list says of a version's document: its number, from 1, the tokens of its examples, and its name."""

    number: int | None = 0
    tokens: int | None = 0
    name: str | None = None


def write_history(folder: Path, history: SplitHistory, entries: Mapping[int, Entry] | None = None) -> None:
    """Writes the list of documents into the folder of a new version; `entries` are by the documents' keys."""
    unknown, entries = Entry(None, None), entries or {}
    documents = (replace(each, **entries.get(each.key, unknown)._asdict()) for each in history.documents)
    (folder / DOCUMENTS).write_text(to_text(SplitHistory(tuple(documents), history.salt)), encoding="utf-8")


def to_text(history: SplitHistory) -> str:
    """Returns the content of the file, with one line for each document."""
    documents = ",\n".join(
        json.dumps({name: getattr(document, name) for name in _NAMES} | {"sketch": document.sketch.tolist()})
        for document in history.documents
    )
    has_many = any((document.drawn_fold or 0) >= FEW_FOLDS for document in history.documents)
    number = _FORMAT_OF_MANY_FOLDS if has_many else _FORMAT
    return f'{{"format": {number}, "salt": "{history.salt.hex()}", "documents": [\n{documents}\n]}}\n'


def read_history(folder: Path, store_salt: bytes = b"") -> SplitHistory | None:
    """Reads the file from a version's folder; returns None if the version has none, as those of 0.1.0."""
    path = folder / DOCUMENTS
    try:
        values = read_json(path, _MAX_BYTES)
        if type(values["format"]) is int and values["format"] > _FORMAT_OF_MANY_FOLDS:
            raise AdapterError(
                f"{str(path)!r} was written by a newer sebp-edge, in format {values['format']}; this one reads up "
                f"to format {_FORMAT_OF_MANY_FOLDS}. Upgrade sebp-edge."
            )
        if values["format"] in _PACKED_FORMATS:
            values = _unpack(values, store_salt)
        elif values["format"] not in (_FORMAT, _FORMAT_OF_MANY_FOLDS):
            raise ValueError("format")
        return SplitHistory(tuple(map(_document, values["documents"])), salt_of(values["salt"]))
    except FileNotFoundError:
        return None
    except (OSError, LookupError, TypeError, ValueError, OverflowError) as error:
        reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
        raise AdapterError(
            f"{str(path)!r} cannot be read{reason}, so it is not known which documents this version of the adapter "
            "was tested on; restore the file, or remove the version."
        ) from error


def _document(values: dict) -> KnownDocument:
    """Returns a document of the file; raises a LookupError, TypeError, ValueError or OverflowError if it is invalid."""
    document = KnownDocument(**values | {"sketch": array("I", values["sketch"])})
    if not (
        values.keys() == {*_NAMES}
        and _HASH.fullmatch(document.hash)
        and isinstance(document.name, str | None)
        and all(map(_is_count, (document.number or 0, document.tokens or 0, document.num_shingles)))
        and document.split in (None, *ROLES)
        and type(document.absent) is bool
        and document.drawn_split in (None, *SPLITS)
        and document.drawn_fold in (None, *range(MANY_FOLDS))
        and len(document.sketch) == min(document.num_shingles, SKETCH_SIZE)
        and all(map(_is_count, values["sketch"]))
    ):
        raise ValueError("documents")
    return document


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _unpack(values: Mapping, store_salt: bytes) -> dict:
    """Returns the values of formats 1 and 2 as they are written now; format 1 had neither a salt nor names.

    Raises a LookupError, TypeError or ValueError if they are invalid.
    """
    hashes, counts = _numbers(values["keys"], 8), _numbers(values["num_shingles"], 4)
    shingles = iter(_numbers(values["sketches"], 4))
    sketches = [list(islice(shingles, min(count, _PACKED_SKETCH_SIZE))) for count in counts]
    if next(shingles, None) is not None:
        raise ValueError("sketches")
    unknown = [None] * len(hashes)
    columns = {
        "hash": [f"{hash:016x}" for hash in hashes],
        "name": values.get("names", unknown) if values["format"] == 2 else unknown,
        "number": _numbers(values["numbers"], 4) if "numbers" in values else unknown,
        "tokens": _numbers(values["tokens"], 4) if "numbers" in values else unknown,
        "split": _choices(values["roles"], _PACKED_ROLES),
        "absent": _choices(values.get("absent", "0" * len(hashes)), (False, True)),
        "drawn_split": _choices(values["splits"], _PACKED_SPLITS),
        "drawn_fold": _choices(values["folds"], (0, 1, 2)),
        "num_shingles": counts,
        "sketch": sketches,
    }
    documents = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    return {"salt": store_salt.hex() if values["format"] == 1 else values["salt"], "documents": documents}


def _numbers(text: str, size: int) -> list[int]:
    """Returns the unsigned little-endian numbers of `size` bytes that were packed into a text."""
    content = base64.b64decode(text, validate=True)
    return [int.from_bytes(content[at : at + size], "little") for at in range(0, len(content), size)]


def _choices(text: str, options: Sequence) -> list:
    """Returns the option of each digit, and None for "-"."""
    return [None if character == "-" else options[int(character)] for character in text]
