"""The result of an adaptation that has nothing to learn; imports no torch."""

from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.learning_on.comparison import TextsComparison


@dataclass(frozen=True)
class UnchangedResult:
    """What `adapt` returns if the active version has learnt all the texts already: nothing was trained or saved.

    Attributes:
        unchanged: True; False in an `AdaptResult`.
        kept: whether the gate kept that version when it was made.
        active: True, since it stays active.
        name, version, adapter_path: where it is.
        documents: the number of documents.
        gone: the number of documents that are gone, but that the version still knows.
    """

    kept: bool
    name: str
    version: int
    adapter_path: Path
    documents: int
    gone: int
    unchanged: bool = True
    active: bool = True

    @classmethod
    def of(cls, comparison: TextsComparison) -> "UnchangedResult":
        """Returns the result for texts that have nothing new."""
        saved = comparison.saved
        kept = saved.record.verdict == "kept"
        return cls(kept, saved.name, saved.version, saved.path, len(comparison.hashes), comparison.num_missing)

    @property
    def summary(self) -> str:
        """What was found."""
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        found = (
            f"Nothing is new in {documents}: version {self.version} of the adapter {self.name!r} has learnt all of "
            "them, and stays active."
        )
        if not self.gone:
            return found
        is_one = self.gone == 1
        return (
            f"{found} It also knows {self.gone:,} document{'s' * (not is_one)} that {'is' if is_one else 'are'} gone; "
            "--sync (sync=True) learns again without."
        )

    def to_dict(self) -> dict:
        """Returns the result as JSON-ready values: the last line of `sebp-edge adapt --json`."""
        return {"event": "result", **asdict(self), "adapter_path": str(self.adapter_path), "summary": self.summary}
