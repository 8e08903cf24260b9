"""The result of an adaptation that has nothing to learn; imports no torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sebp_edge.adapters.store import AdapterStore
from sebp_edge.adapters.where import Where
from sebp_edge.run.texts_comparison import TextsComparison
from sebp_edge.texts.readers import Reading


@dataclass(frozen=True)
class UnchangedResult:
    """What `adapt` returns if the active version has learnt all the texts already: nothing was trained or saved.

    Attributes:
        unchanged: True; False in an `AdaptResult`.
        kept: whether the gate kept that version when it was made.
        active: True, since it stays active.
        name, version, adapter_path: where it is.
        documents: the number of documents.
        gone: the number of documents that the version knows and that are not among the texts.
        changes: the values of the recipe that the version was not trained with: its setting ("epochs = 3"), and the
            recipe's.
    """

    kept: bool
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
        kept = saved.record.verdict == "kept"
        changes = tuple((before, now) for _, before, now in comparison.changes)
        return cls(kept, saved.name, saved.version, saved.path, len(comparison.hashes), comparison.num_missing, changes)

    @property
    def summary(self) -> str:
        """What was found."""
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        found = (
            f"Nothing is new in {documents}: version {self.version} of the adapter {self.name!r} has learnt all of "
            "them, and stays active."
        )
        if self.gone:
            known = f"{self.gone:,} document{'s' * (self.gone != 1)} that {'is' if self.gone == 1 else 'are'}"
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
        return {"event": "result", **asdict(self), "adapter_path": str(self.adapter_path), "summary": self.summary}


def remember_texts(store: AdapterStore, comparison: TextsComparison, reading: Reading) -> None:
    """Remembers where texts are now that a version has learnt already, in case that their folder was moved."""
    adapter = store.adapter(comparison.saved.name)
    before = adapter.wheres().get(comparison.version, Where())
    earlier = before.earlier_than(reading.folders) if comparison.num_missing else ()
    now = replace(before, texts=(reading.folders, *earlier))
    if reading.folders and now != before:
        adapter.remember_where(comparison.version, now)
