"""What `gc` deletes. The rule: of each adapter,

- the active version, the one that was active before it, the best so far, and the newest three (or `keep`) stay;
- a version of an interrupted training goes once there is a newer version, unless it is active or was before;
- all others go, and so does what killed processes have left.

A version whose record cannot be read stays.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sebp_edge.errors import AdapterError
from sebp_edge.store.activation import read_activated
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.folders import size_of
from sebp_edge.store.record import AdapterRecord

KEPT_VERSIONS = 3


@dataclass(frozen=True)
class OldVersion:
    """A version that `gc` deletes: why ("old" or "interrupted"), and the size of its files in bytes."""

    name: str
    version: int
    reason: str
    size: int


@dataclass(frozen=True)
class Garbage:
    """What `gc` deletes.

    Attributes:
        keep: how many of the newest versions of each adapter are kept.
        versions: the versions that go.
        leftovers: the sizes of the files and folders of killed processes, in bytes.
    """

    keep: int
    versions: tuple[OldVersion, ...] = ()
    leftovers: Mapping[Path, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(version.size for version in self.versions) + sum(self.leftovers.values())

    def only(self, other: "Garbage") -> "Garbage":
        """Returns what is in both."""
        named = {(one.name, one.version) for one in other.versions}
        versions = tuple(one for one in self.versions if (one.name, one.version) in named)
        leftovers = {path: size for path, size in self.leftovers.items() if path in other.leftovers}
        return Garbage(self.keep, versions, leftovers)

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values."""
        return {
            "keep": self.keep,
            "versions": [asdict(version) for version in self.versions],
            "leftovers": [str(path) for path in self.leftovers],
            "size": self.size,
        }


def old_versions(adapter: Adapter, keep: int) -> list[OldVersion]:
    """Returns the versions of one adapter that go."""
    records, found = {}, []
    for version in adapter.versions():
        with suppress(AdapterError):
            records[version] = AdapterRecord.read(adapter.folder / str(version))
    newest = sorted(records)[-keep:]
    stays = {*read_activated(adapter.folder)[:2], *read_best_versions(adapter).best[:1]}
    for version, record in records.items():
        interrupted = record.is_interrupted and version != newest[-1]
        if version not in stays and (interrupted or version not in newest):
            reason = "interrupted" if interrupted else "old"
            found.append(OldVersion(adapter.name, version, reason, size_of(adapter.folder / str(version))))
    return found
