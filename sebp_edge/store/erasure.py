"""Removes the versions that knew forgotten documents, and the documents from the lists of others; writes the receipt.

What is to be removed is written down first, in the adapter's folder, so that a removal that was interrupted can be
completed. It ends with the receipt, so that no receipt claims what did not happen.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sebp_edge.basics.files import flush, parse_dataclass, read_json, storage_errors, write_atomically
from sebp_edge.basics.version import __version__
from sebp_edge.errors import AdapterError
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.version_documents import to_text

_PENDING = ".forgetting"
_RECEIPT = re.compile(r"forgotten-([1-9]\d{0,8})\.json")
_FORMAT = 1
NOT_REACHED = (
    "Not reached: exported models, archives, backups and other copies of removed versions, other adapters, programs "
    "that have a removed version in memory, trainings that are running, and what killed ones left in the last hour."
)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What was forgotten, and how; contains no text and no name of a document.

    Attributes:
        name: the adapter's name.
        documents: the salted hashes of the forgotten documents.
        near_duplicates: those of near-duplicates that were found and are still known.
        versions_removed: the versions that were removed.
        lost: how many other documents they had learnt after the version that was active; the next adaptation learns
            these again.
        replaced_by: the version that was trained without the documents; None if the active one did not know them.
        active: the version that is active now; None if there is none.
        exact: what the new version is equal to.
        weights: the hash of its weights, as `SavedAdapter.weights_hash` returns it, if a training that never had the
            documents gives these bit for bit; None on a GPU, without a new version, and in older receipts.
        not_reached: what may still know the documents.
        forgotten: when they were forgotten, in UTC, as an ISO 8601 string.
        path: the file of this receipt, in the adapter's folder.
        sebp_edge: the version of sebp-edge.
        format: the format of the file.
    """

    name: str
    documents: tuple[str, ...]
    near_duplicates: tuple[str, ...]
    versions_removed: tuple[int, ...]
    replaced_by: int | None
    exact: str
    weights: str | None = None
    lost: int = 0
    active: int | None = None
    not_reached: str = NOT_REACHED
    forgotten: str = ""
    path: str = ""
    sebp_edge: str = __version__
    format: int = _FORMAT

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values."""
        return asdict(self)


def erase(adapter: Adapter, receipt: Receipt, keys: Mapping[bytes, set[int]]) -> Receipt:
    """Removes the receipt's versions, and documents that others remember, by salt; returns the completed receipt."""
    folder = adapter.folder
    with storage_errors("Nothing was removed: cannot write to", folder):
        taken = [int(found[1]) for path in folder.iterdir() if (found := _RECEIPT.fullmatch(path.name))]
        values = receipt.to_dict() | {"path": f"forgotten-{1 + max(taken, default=0)}.json"}
        hashes = {salt.hex(): sorted(f"{key:016x}" for key in own) for salt, own in keys.items()}
        write_atomically(folder / _PENDING, json.dumps({"receipt": values, "hashes": hashes}))
    return complete(adapter)


def complete(adapter: Adapter) -> Receipt | None:
    """Completes a removal that was interrupted; returns its receipt, or None if there was none to complete."""
    folder = adapter.folder
    if not (folder / _PENDING).exists():
        return None
    receipt, keys = _read(folder / _PENDING)
    versions = adapter.versions()
    lists = {}
    for version in set(versions) - set(receipt.versions_removed):
        with suppress(AdapterError):  # one that cannot be read remembers nothing that can be found
            if listed := adapter.document_list(version):
                kept = listed.without_earlier(keys.get(listed.salt, ()))
                if kept != listed:
                    lists[version] = to_text(kept)
    adapter.erase([version for version in receipt.versions_removed if version in versions], lists, keys)
    path = folder / receipt.path
    receipt = replace(
        receipt,
        name=adapter.name,
        active=adapter.active(),
        forgotten=datetime.now(UTC).isoformat(timespec="seconds"),
        path=str(path),
    )
    with storage_errors("The documents are forgotten, but the receipt cannot be written:", path):
        write_atomically(path, json.dumps(receipt.to_dict() | {"path": path.name}, indent=2) + "\n")
        (folder / _PENDING).unlink()
        flush(folder)
    return receipt


def read_receipts(adapter: Adapter) -> list[Receipt]:
    """Returns the receipts of an adapter, oldest first.

    Raises:
        AdapterError: one of them is damaged.
        StorageError: the folder cannot be read.
    """
    if not adapter.exists():
        return []
    with storage_errors("Cannot read the receipts in", adapter.folder, ""):
        numbers = sorted(int(found[1]) for path in adapter.folder.iterdir() if (found := _RECEIPT.fullmatch(path.name)))
    paths, receipts = [adapter.folder / f"forgotten-{number}.json" for number in numbers], []
    for path in paths:
        try:
            receipts.append(parse_dataclass(read_json(path) | {"path": str(path)}, Receipt))
        except (OSError, ValueError, TypeError) as error:
            raise AdapterError(
                f"The receipt {str(path)!r} cannot be read, so nothing can be verified by it."
            ) from error
    return receipts


def _read(path: Path) -> tuple[Receipt, dict[bytes, set[int]]]:
    try:
        values = read_json(path)
        receipt = parse_dataclass(values["receipt"], Receipt)
        keys = {bytes.fromhex(salt): {int(hash, 16) for hash in own} for salt, own in values["hashes"].items()}
        if not _RECEIPT.fullmatch(receipt.path):
            raise ValueError("receipt")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise AdapterError(
            f"{str(path)!r}, which says what is still to be forgotten, cannot be read; delete it and forget the "
            "document again."
        ) from error
    return receipt, keys
