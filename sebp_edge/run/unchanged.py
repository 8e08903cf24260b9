"""The result of an adaptation that has nothing to learn; imports no torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sebp_edge.basics.units import are, plural
from sebp_edge.run.texts_comparison import TextsComparison
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.where import Where
from sebp_edge.values.reading import Reading


@dataclass(frozen=True)
class UnchangedResult:
    """What `adapt` returns if the active version has learnt all the texts already: nothing was trained or saved.

    Attributes:
        unchanged: True; False in an `AdaptResult`.
        passed: whether the gate found that version better when it was made.
        active: True, since it stays active.
        name, version, adapter_path: where it is.
        documents: the number of documents.
        gone: the number of documents that the version knows and that are not among the texts.
        changes: the values of the recipe that the version was not trained with: its setting ("epochs = 3"), and the
            recipe's.
    """

    passed: bool
    name: str
    version: int
    adapter_path: Path
    documents: int
    gone: int
    changes: tuple[tuple[str, str], ...] = ()
    unchanged: bool = True
    active: bool = True

    @classmethod
    def of(cls, comparison: TextsComparison) -> "UnchangedResult":
        """Returns the result for texts that have nothing new."""
        saved = comparison.saved
        passed = saved.record.passed
        changes = tuple((before, now) for _, before, now in comparison.changes)
        return cls(
            passed, saved.name, saved.version, saved.path, len(comparison.hashes), comparison.num_missing, changes
        )

    @property
    def summary(self) -> str:
        """What was found."""
        found = (
            f"Nothing is new in {plural(self.documents, 'document')}: version {self.version} of the adapter "
            f"{self.name!r} has learnt all of them, and stays active."
        )
        if self.gone:
            known = f"{plural(self.gone, 'document')} that {are(self.gone)}"
            found += f" It also knows {known} not among these texts; --sync (sync=True) learns again without."
        if self.changes:
            before, now = (" and ".join(settings) for settings in zip(*self.changes, strict=True))
            found += (
                f" It was trained with {before}, and this recipe has {now}; --fresh (fresh=True) learns all documents "
                "again with that."
            )
        return found

    def to_dict(self) -> dict:
        """Returns the result as JSON-ready values: the last line of `sebp-edge adapt --json`."""
        words = {"adapter_path": str(self.adapter_path), "summary": self.summary}
        return {"event": "result", "result_of": "adapt", **asdict(self), **words}


def find_unchanged(
    adapter: Adapter, active: TextsComparison | None, reading: Reading, *, fresh: bool, sync: bool
) -> UnchangedResult | None:
    """Returns the result if nothing is new; remembers where the texts are now, in case that their folder was moved.

    Args:
        active: the active version of the adapter beside the texts; None if no version is active.
        fresh, sync: see `Personalizer.adapt`.
    """
    if active is None or fresh or not active.is_unchanged(sync=sync):
        return None
    before = adapter.wheres().get(active.version, Where())
    earlier = before.earlier_than(reading.folders) if active.num_missing else ()
    now = replace(before, texts=(reading.folders, *earlier))
    if reading.folders and now != before:
        adapter.remember_where(active.version, now)
    return UnchangedResult.of(active)
