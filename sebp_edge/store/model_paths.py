"""Where base models are that were given as a folder or a GGUF file: their paths, by the models' fingerprints.

Adapters record a model's name only, since they may be given away. The paths are in one file of the store, which only
its owner can read, and which no archive contains.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sebp_edge.basics.files import read_json, write_atomically
from sebp_edge.errors import AdapterError
from sebp_edge.store.folders import all_versions
from sebp_edge.store.record import AdapterRecord

_FILE = ".models"


def path_of(store: Path, fingerprint: str) -> Path | None:
    """Returns where a model was when an adapter was made for it or used with it; None if that is not known."""
    path = _read(store).get(fingerprint)
    return Path(path) if isinstance(path, str) else None


def remember(store: Path, fingerprint: str, path: Path) -> None:
    """Writes where a model is; only for the holder of the store's lock."""
    _write(store, _read(store) | {fingerprint: str(path)})


def fingerprints_of(versions: Iterable[Path]) -> set[str]:
    """Returns the fingerprints of the base models of versions whose records can be read."""
    found = set()
    for folder in versions:
        with suppress(AdapterError):
            found.add(AdapterRecord.read(folder).fingerprint)
    return found


def forget_unused(store: Path, fingerprints: set[str]) -> None:
    """Deletes the paths of those of these models that no version was made for; only for the holder of the lock."""
    known = _read(store)
    if not known.keys().isdisjoint(fingerprints):
        unused = fingerprints - fingerprints_of(all_versions(store))
        _write(store, {name: path for name, path in known.items() if name not in unused})


def _read(store: Path) -> dict:
    try:
        return read_json(store / _FILE)
    except (OSError, ValueError):  # the user is asked for the model, and the file is written anew
        return {}


def _write(store: Path, paths: dict) -> None:
    write_atomically(store / _FILE, json.dumps(paths, indent=1) + "\n")
