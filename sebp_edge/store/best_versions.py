"""Reads which version of an adapter may be the best so far, and how many the gate has refused."""

from contextlib import suppress
from typing import NamedTuple

from sebp_edge.errors import AdapterError
from sebp_edge.store.activation import read_activated
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.record import AdapterRecord


class BestVersions(NamedTuple):
    """The best versions of an adapter.

    Attributes:
        best: the best version so far, then those that were it before; some may have been removed.
        refused: how many versions the gate has refused beside an earlier one.
    """

    best: tuple[int, ...] = ()
    refused: int = 0


def read_best_versions(adapter: Adapter) -> BestVersions:
    """Reads the records of all versions; leaves out those that cannot be read, and those that were never active."""
    if not adapter.exists():
        return BestVersions()
    versions, activated, found, refused = adapter.versions(), read_activated(adapter.folder), [], 0
    for version in reversed(versions):
        with suppress(AdapterError):
            record = AdapterRecord.read(adapter.folder / str(version))
            # Records of older versions do not say which is the best.
            is_best = record.passed if record.is_best is None else record.is_best
            found.append(version if is_best else record.best_before)
            refused = max(refused, record.refused or 0)
    best = dict.fromkeys(number for number in found if number in activated or number not in (*versions, None))
    return BestVersions(tuple(best), refused)
