"""Saves the adapter of a training run; if that fails, saves it elsewhere so that it is not lost."""

import secrets
import shlex
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sebp_edge.engine.models.adaptation import Adaptation, save_snapshots
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.errors import SebpEdgeError, StorageError
from sebp_edge.run.reporting import Report
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.history import Entry, write_history
from sebp_edge.store.known_texts import KnownTexts
from sebp_edge.store.names import folder_of
from sebp_edge.store.saved import JUDGED, SavedAdapter, save_to
from sebp_edge.store.training_report import write_report
from sebp_edge.store.where import Where
from sebp_edge.values.remembered import SplitHistory


@dataclass(frozen=True)
class NewVersion:
    """What a version's folder contains.

    Attributes:
        judged_states: the states that the gate judged, for later comparisons; empty if the only one is `adaptation`'s.
        splits: the split of each document; None outside the store.
        entries: what the list of documents says of each, by the key of its fingerprint.
        known: the texts that it has learnt; None if it cannot be learnt on from.
        keeps_words: whether words and names of the user's are kept.
        where: where its texts are; not in the version's folder.
    """

    adaptation: Adaptation
    judged_states: list[list[Tensor]]
    splits: SplitHistory | None
    entries: dict[int, Entry]
    known: KnownTexts | None
    report: Report
    keeps_words: bool = False
    where: Where = field(default_factory=Where)

    @classmethod
    def of(cls, run: TrainingRun, texts: VersionTexts, report: Report, *, keeps_words: bool) -> "NewVersion":
        """Collects a run's states.

        A state that the gate has not judged is no state to compare later versions with.
        """
        history = texts.history
        if history is not None and run.result is None:
            history = history.all_trained_on()
        judged = run.judged_states if run.result and run.result.is_refit else []
        tokens = Counter()
        for example in run.task.dataset.examples:
            tokens[example.document] += len(example.input_ids)
        entries = {
            fingerprint.key: Entry(number + 1, tokens[number], run.task.dataset.names.get(number))
            for number, fingerprint in run.task.dataset.draw.fingerprints.items()
        }
        entries = texts.entries | entries
        return cls(run.adaptation, judged, history, entries, texts.known, report, keeps_words, texts.where)

    def save(self, folder: Path) -> None:
        """Writes the weights, the judged states in `judged/1` and so on, what it knows of its texts, and the report."""
        judged = {folder / JUDGED / str(number): state for number, state in enumerate(self.judged_states, start=1)}
        for own in judged:
            own.mkdir(parents=True)
        save_snapshots(self.adaptation, judged)
        self.adaptation.save(folder)
        if self.splits is not None:
            write_history(folder, self.splits, self.entries)
        if self.known is not None:
            self.known.write(folder)
        write_report(folder, self.report.training, self.report.words if self.keeps_words else None)


@dataclass(frozen=True)
class Place:
    """Where an adapter is saved.

    Attributes:
        out: a new folder, if the adapter is saved there instead of in the store.
    """

    store: AdapterStore
    name: str
    out: Path | None = None

    @property
    def adapter(self) -> Adapter:
        """The adapter in the store, whether it exists or not."""
        return self.store.adapter(self.name)

    @property
    def active_version(self) -> int | None:
        """The version that is active now; None if there is none, or outside the store."""
        return None if self.out is not None else self.adapter.active()

    def save(self, version: NewVersion, prefix: str = "") -> SavedAdapter:
        """Saves a version without activating it.

        Args:
            prefix: the beginning of an error's message.

        Raises:
            StorageError: it could not be saved there; the message says where it was saved instead.
        """
        try:
            if self.out is None:
                return self._save_in_store(version)
            return save_to(version, version.report.record, self.out)
        except SebpEdgeError as error:
            message = " ".join(filter(None, [prefix, str(error), self._save_elsewhere(version)]))
            raise StorageError(message) from error

    def _save_in_store(self, version: NewVersion) -> SavedAdapter:
        return self.adapter.save(version, version.report.record, activate=False, where=version.where)

    def _save_elsewhere(self, version: NewVersion) -> str:
        """Saves into the store if `out` failed, else into the system's temporary folder; says where, in a sentence."""
        if self.out is not None:
            with suppress(SebpEdgeError):
                return f"Instead, {describe_location(self._save_in_store(version))}."
        with suppress(SebpEdgeError):
            folder = Path(tempfile.gettempdir()) / f"sebp-edge-{folder_of(self.name)}-{secrets.token_hex(4)}"
            save_to(version, version.report.record, folder)
            return f"Instead, the adapter is saved in {str(folder)!r}; move it before the system deletes it."
        return "The adapter could not be saved anywhere."


def describe_location(saved: SavedAdapter) -> str:
    """Describes in words where a saved adapter is."""
    if saved.name is None:
        return f"the adapter is saved in {str(saved.path)!r}"
    state = "and active" if saved.active else "but not active"
    return f"version {saved.version} of the adapter {saved.name!r} is saved {state}"


def has_commands(store: AdapterStore, saved: SavedAdapter) -> bool:
    """Whether the command line finds a saved adapter by its name."""
    return saved.name is not None and store.folder == AdapterStore().folder


def describe_resumption(store: AdapterStore, job: str) -> str:
    """Returns the command that goes on with a job, or the call if the command line does not find it."""
    if store.folder == AdapterStore().folder:
        return f"sebp-edge adapt --resume={job}"
    return f"personalizer.resume({job!r})"


def describe_activation(store: AdapterStore, saved: SavedAdapter) -> str:
    """Returns the command that activates a version, or the call if the command line does not find it."""
    if has_commands(store, saved):
        return shlex.join(["sebp-edge", "adapters", "activate", saved.name, str(saved.version)])
    return f"store.adapter({saved.name!r}).activate({saved.version})"
