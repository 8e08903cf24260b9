"""The file documents.json of an adapter's version: how its documents were split, without their texts and names.

Each value in it has all documents: in base64 if they are numbers, else with one character for each document. The
version's own documents also have a number, in the order of the texts, and a count of tokens; 0 for others.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sebp_edge.adapters.names import check_name
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.errors import AdapterError
from sebp_edge.files import read_json
from sebp_edge.texts.near_duplicates import SKETCH_SIZE, Shingles
from sebp_edge.texts.split_history import NUM_FOLDS, ROLES, SPLITS, Remembered, SplitHistory

DOCUMENTS = "documents.json"
_FORMAT = 1
# The size limit of the file, in bytes; a long document takes 400.
_MAX_BYTES = 2**29
_KEY, _NUMBER = "<u8", "<u4"
_NO_HASHES = np.empty(0, np.uint32)
_FOLDS = tuple(range(NUM_FOLDS))
_NO_OR_YES = (False, True)


@dataclass(frozen=True)
class KnownDocument:
    """A document of a version, without its text.

    Attributes:
        hash: a salted hash of its text, as 16 hexadecimal digits.
        number: its number in the order in which the texts were given, from 1; None in versions saved before.
        tokens: how many tokens its examples have; None in versions saved before.
        split: how the version used it: "train", "validation", "test", or "fold 1" and so on, which tested it.
        sketch: a sketch of its shingles.
    """

    hash: str
    number: int | None
    tokens: int | None
    split: str
    sketch: Shingles = field(repr=False)

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values, without the sketch."""
        return {"number": self.number, "hash": self.hash, "tokens": self.tokens, "split": self.split}


def write_history(folder: Path, history: SplitHistory, counts: Mapping[int, tuple[int, int]] | None = None) -> None:
    """Writes the file into the folder of a new version.

    Args:
        counts: the number and the tokens of each document of this version, by its key.

    Raises:
        OSError: it cannot be written.
    """
    documents = history.documents
    values = {
        "format": _FORMAT,
        "keys": _to_base64([document.key for document in documents], _KEY),
        "num_shingles": _to_base64([document.sketch.number for document in documents], _NUMBER),
        "sketches": _to_base64(
            np.concatenate([_NO_HASHES, *(document.sketch.hashes for document in documents)]), _NUMBER
        ),
        "splits": _to_characters([document.split for document in documents], SPLITS),
        "folds": _to_characters([document.fold for document in documents], _FOLDS),
        "roles": _to_characters([document.role for document in documents], ROLES),
        "absent": _to_characters([document.absent for document in documents], _NO_OR_YES),
    }
    if counts is not None:
        for index, name in enumerate(("numbers", "tokens")):
            values[name] = _to_base64([counts.get(document.key, (0, 0))[index] for document in documents], _NUMBER)
    (folder / DOCUMENTS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_history(folder: Path) -> SplitHistory | None:
    """Reads the file from a version's folder; returns None if the version has none, as those of 0.1.0.

    Raises:
        AdapterError: it is damaged, cannot be read, or was written by a newer sebp-edge.
    """
    return _read(folder, lambda values: _READERS[values["format"]](values))


def read_documents(folder: Path) -> list[KnownDocument] | None:
    """Reads the documents of a version, in the order in which they were given; returns None if they are not known.

    Raises:
        AdapterError: see `read_history`.
    """
    return _read(folder, _known_documents)


def _read(folder: Path, convert: Callable[[dict], Any]) -> Any:
    path = folder / DOCUMENTS
    try:
        values = read_json(path, _MAX_BYTES)
        if type(values["format"]) is int and values["format"] > _FORMAT:
            raise AdapterError(
                f"{str(path)!r} was written by a newer sebp-edge, in format {values['format']}; this one reads format "
                f"{_FORMAT}. Upgrade sebp-edge."
            )
        return convert(values)
    except FileNotFoundError:
        return None
    except (OSError, LookupError, TypeError, ValueError) as error:
        reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
        raise AdapterError(
            f"{str(path)!r} cannot be read{reason}, so it is not known which documents this version of the adapter was "
            "tested on; restore the file, or remove the version."
        ) from error


def latest_history(store: AdapterStore, name: str) -> SplitHistory | None:
    """Reads the history from which the next version of an adapter draws its splits; returns None if there is none.

    It is the active version's, so that a rejected version takes no test documents from later ones; else the latest.

    Raises:
        AdapterError: its file is damaged.
    """
    if check_name(name) not in store.names():
        return None
    active = store.active_version(name)
    for version in sorted(store.versions(name), key=lambda version: (version == active, version), reverse=True):
        if (history := read_history(store.version_folder(name, version))) is not None:
            return history
    return None


def _history(values: dict) -> SplitHistory:
    """Returns the history; raises a LookupError, TypeError or ValueError if a value is invalid."""
    keys, numbers = _from_base64(values["keys"], _KEY), _from_base64(values["num_shingles"], _NUMBER)
    ends = np.cumsum(np.minimum(numbers, SKETCH_SIZE), dtype=np.int64)
    hashes = _from_base64(values["sketches"], _NUMBER)
    # Raises a ValueError if the values are of different lengths.
    hashes = hashes.reshape(ends[-1] if len(ends) else 0)
    documents = zip(
        keys.tolist(),
        map(Shingles, np.split(hashes, ends[:-1]), numbers.tolist()),
        _from_characters(values["splits"], SPLITS),
        _from_characters(values["folds"], _FOLDS),
        _from_characters(values["roles"], ROLES),
        _from_characters(values.get("absent", "0" * len(keys)), _NO_OR_YES),
        strict=True,
    )
    return SplitHistory(tuple(Remembered(*document) for document in documents))


def _known_documents(values: dict) -> list[KnownDocument]:
    """Returns the version's own documents; raises as `_history` does."""
    documents = _READERS[values["format"]](values).documents
    counts = [(None, None)] * len(documents)
    if "numbers" in values:
        numbers, tokens = (_from_base64(values[key], _NUMBER).tolist() for key in ("numbers", "tokens"))
        counts = list(zip(numbers, tokens, strict=True))
    known = [
        KnownDocument(f"{document.key:016x}", *count, document.role, document.sketch)
        for document, count in zip(documents, counts, strict=True)
        if document.role is not None and not document.absent
    ]
    return sorted(known, key=lambda document: document.number or 0)


# By format.
_READERS = {_FORMAT: _history}


def _to_base64(numbers, dtype: str) -> str:
    return base64.b64encode(np.asarray(numbers, dtype).tobytes()).decode()


def _from_base64(text: str, dtype: str) -> np.ndarray:
    numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return numbers.astype(numbers.dtype.newbyteorder("="))


def _to_characters(values: Sequence, options: Sequence) -> str:
    """Returns the index of each value as a digit, and "-" for None."""
    return "".join("-" if value is None else str(options.index(value)) for value in values)


def _from_characters(text: str, options: Sequence) -> list:
    return [None if character == "-" else options[int(character)] for character in text]
