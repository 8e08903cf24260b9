"""The file documents.json of an adapter's version: its documents and how they were split, without their texts.

Each value in it has all documents: in base64 if they are numbers, as a list if they are names, else with one character
for each document. The version's own documents also have a number, in the order of the texts, a count of tokens, and a
name; others have 0, 0 and null. The salt of the hashes is that of all versions of an adapter; in format 1, which has
neither salt nor names, it is the store's.
"""

import base64
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sebp_edge.adapters.names import check_name
from sebp_edge.adapters.store import DOCUMENTS, AdapterStore
from sebp_edge.errors import AdapterError
from sebp_edge.files import read_json
from sebp_edge.texts.near_duplicates import SKETCH_SIZE, Shingles
from sebp_edge.texts.split_history import NUM_FOLDS, ROLES, SPLITS, Remembered, SplitHistory

_FORMAT = 2
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
        name: its name: the path of its file in the given folder, or what the app calls it; None if it has none.
        number: its number in the order in which the texts were given, from 1; None in versions saved before.
        tokens: how many tokens its examples have; None in versions saved before.
        split: how the version used it: "train", "validation", "test", or "fold 1" and so on, which tested it.
        sketch: a sketch of its shingles.
        absent: whether it was gone from the texts; the version knows it from the version that it learnt on from.
    """

    hash: str
    name: str | None
    number: int | None
    tokens: int | None
    split: str
    sketch: Shingles = field(repr=False)
    absent: bool = False

    @property
    def label(self) -> str:
        """What a person calls it: its name, else its number."""
        return self.name or str(self.number or "")

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values, without the sketch."""
        names = ("name", "number", "hash", "tokens", "split", "absent")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Manifest:
    """The documents of a version, in the order in which they were given, and the salt of their hashes."""

    documents: tuple[KnownDocument, ...]
    salt: bytes


class Entry(NamedTuple):
    """What is written of a version's own document: its number, from 1, the tokens of its examples, and its name."""

    number: int = 0
    tokens: int = 0
    name: str | None = None


def write_history(folder: Path, history: SplitHistory, entries: Mapping[int, Entry] | None = None) -> None:
    """Writes the file into the folder of a new version.

    Args:
        entries: the entry of each document of this version, by its key.

    Raises:
        OSError: it cannot be written.
    """
    (folder / DOCUMENTS).write_text(_text_of(history, entries), encoding="utf-8")


def _text_of(history: SplitHistory, entries: Mapping[int, Entry] | None) -> str:
    documents = history.documents
    values = {
        "format": _FORMAT,
        "salt": history.salt.hex(),
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
    if entries is not None:
        own = [entries.get(document.key, Entry()) for document in documents]
        values["numbers"] = _to_base64([entry.number for entry in own], _NUMBER)
        values["tokens"] = _to_base64([entry.tokens for entry in own], _NUMBER)
        values["names"] = [entry.name for entry in own]
    return _to_text(values)


def read_history(folder: Path, store_salt: bytes = b"") -> SplitHistory | None:
    """Reads the file from a version's folder; returns None if the version has none, as those of 0.1.0.

    Args:
        store_salt: the salt of a file that has none.

    Raises:
        AdapterError: it is damaged, cannot be read, or was written by a newer sebp-edge.
    """
    return _read(folder, lambda values: _history(values, store_salt))


def read_manifest(folder: Path, store_salt: bytes = b"") -> Manifest | None:
    """Reads the documents of a version; returns None if they are not known.

    Args:
        store_salt: see `read_history`.

    Raises:
        AdapterError: see `read_history`.
    """
    return _read(folder, lambda values: _manifest(values, store_salt))


def without_names(folder: Path, store_salt: bytes) -> str | None:
    """Returns the text of the file without the names of documents; None if the version has no such file.

    Args:
        store_salt: is written into a file that has no salt.

    Raises:
        AdapterError: see `read_history`.
    """

    def convert(values: dict) -> str:
        salt = _history(values, store_salt).salt
        kept = {key: value for key, value in values.items() if key != "names"}
        return _to_text(kept | {"format": _FORMAT, "salt": salt.hex()})

    return _read(folder, convert)


def without_documents(folder: Path, keys: Mapping[bytes, Collection[int]], store_salt: bytes) -> str | None:
    """Returns the text of the file without documents of earlier versions; None if it has none of them.

    Args:
        keys: the documents' keys, by salt.
        store_salt: see `read_history`.

    Raises:
        AdapterError: see `read_history`.
    """

    def convert(values: dict) -> str | None:
        history, manifest = _history(values, store_salt), _manifest(values, store_salt)
        own = {int(document.hash, 16) for document in manifest.documents}
        kept = history.without(set(keys.get(history.salt, ())) - own)
        if len(kept.documents) == len(history.documents):
            return None
        entries = {
            int(document.hash, 16): Entry(document.number, document.tokens, document.name)
            for document in manifest.documents
        }
        return _text_of(kept, entries if "numbers" in values else None)

    return _read(folder, convert)


def _read(folder: Path, convert: Callable[[dict], Any]) -> Any:
    path = folder / DOCUMENTS
    try:
        values = read_json(path, _MAX_BYTES)
        if type(values["format"]) is int and values["format"] > _FORMAT:
            raise AdapterError(
                f"{str(path)!r} was written by a newer sebp-edge, in format {values['format']}; this one reads up to "
                f"format {_FORMAT}. Upgrade sebp-edge."
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


def latest_history(store: AdapterStore, name: str) -> SplitHistory:
    """Reads the history from which the next version of an adapter draws its splits; without one, draws a new salt.

    It is the active version's, so that a rejected version takes no test documents from later ones; else the latest.

    Raises:
        AdapterError: its file is damaged.
    """
    if check_name(name) in store.names():
        active = store.active_version(name)
        for version in sorted(store.versions(name), key=lambda version: (version == active, version), reverse=True):
            if (history := read_history(store.version_folder(name, version), store.salt())) is not None:
                return history
    return SplitHistory(salt=secrets.token_bytes(16))


def _history(values: dict, store_salt: bytes) -> SplitHistory:
    """Returns the history; raises a LookupError, TypeError or ValueError if a value is invalid."""
    if values["format"] not in (1, _FORMAT):
        raise ValueError("format")
    salt = store_salt if values["format"] == 1 else bytes.fromhex(values["salt"])
    if len(salt) > blake2b.MAX_KEY_SIZE:
        raise ValueError("salt")
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
    return SplitHistory(tuple(Remembered(*document) for document in documents), salt)


def _manifest(values: dict, store_salt: bytes) -> Manifest:
    """Returns the version's own documents; raises as `_history` does."""
    history = _history(values, store_salt)
    unknown = [None] * len(history.documents)
    names, numbers, tokens = values.get("names", unknown), unknown, unknown
    if not isinstance(names, list) or not all(isinstance(name, str | None) for name in names):
        raise ValueError("names")
    if "numbers" in values:
        numbers, tokens = (_from_base64(values[key], _NUMBER).tolist() for key in ("numbers", "tokens"))
    known = [
        KnownDocument(f"{document.key:016x}", *entry, document.role, document.sketch, document.absent)
        for document, *entry in zip(history.documents, names, numbers, tokens, strict=True)
        if document.role is not None
    ]
    return Manifest(tuple(sorted(known, key=lambda document: (document.absent, document.number or 0))), history.salt)


def _to_text(values: dict) -> str:
    return json.dumps(values, indent=2) + "\n"


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
