"""Saves the adapter of a training run; if that fails, saves it elsewhere so that it is not lost."""

import secrets
import shlex
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from sebp_edge.basics.files import write_checked_json
from sebp_edge.engine.models.adaptation import Adaptation, save_snapshots
from sebp_edge.engine.training.facts import facts_of
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.errors import SebpEdgeError, StorageError
from sebp_edge.run.assessment import Assessment
from sebp_edge.run.known_losses import TESTED, KnownLosses
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.folders import write_record
from sebp_edge.store.names import folder_of
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.saved import JUDGED, SavedAdapter, save_to
from sebp_edge.store.training_report import write_report
from sebp_edge.store.version_documents import write_history
from sebp_edge.values.training_facts import TrainingFacts, facts_for


@dataclass(frozen=True)
class NewVersion:
    """What a version's folder contains.

    Attributes:
        judged_states: the states that the gate judged, for later comparisons; empty if the only one is `adaptation`'s.
        tested: its test losses by document (see `KnownLosses`); empty if it was not tested by losses.
        texts: what it knows of its texts; in the folder are its splits, the list of documents and what it has learnt.
        keeps_words: whether words and names of the user's are kept.
    """

    adaptation: Adaptation
    judged_states: list[list[Tensor]]
    texts: VersionTexts
    facts: TrainingFacts
    record: AdapterRecord
    tested: dict
    keeps_words: bool

    @classmethod
    def of(
        cls, run: TrainingRun, texts: VersionTexts, assessment: Assessment | None, *, keeps_words: bool
    ) -> "NewVersion":
        """Collects a run's states and facts.

        A state that the gate has not judged is no state to compare later versions with.

        Args:
            assessment: None if it was stopped; the run has no result if the training was.
        """
        facts, base = facts_of(run), run.base
        if texts.learnt_on is not None:
            facts = replace(facts, learnt_on=texts.learnt_on, learnt_on_from=texts.learnt_on.version)
        if assessment is not None:
            facts = replace(facts, **vars(assessment))
        record = facts_for(
            AdapterRecord,
            facts,
            base_model=base.reference.public_name,
            model=base.reference.name,
            fingerprint=base.fingerprint,
            recipe=asdict(run.task.recipe),
            quiz=asdict(facts.quiz) if facts.quiz else None,
        )
        if texts.history is not None and run.result is None:
            texts = replace(texts, history=texts.history.all_trained_on())
        judged, tested = run.judged_states if run.result and run.result.is_refit else [], {}
        if run.result is not None and run.result.gain is not None and facts.quiz is None:
            tested = KnownLosses(base, run.task.dataset).values(run.result)
        return cls(run.adaptation, judged, texts, facts, record, tested, keeps_words)

    def save(self, folder: Path) -> None:
        """Writes the weights, the judged states in `judged/1` and so on, what it knows of its texts, and the report."""
        judged = {folder / JUDGED / str(number): state for number, state in enumerate(self.judged_states, start=1)}
        for place in judged:
            place.mkdir(parents=True)
        save_snapshots(self.adaptation, judged)
        self.adaptation.save(folder)
        if self.texts.history is not None:
            write_history(folder, self.texts.history, self.texts.entries)
        if self.texts.known is not None:
            self.texts.known.write(folder)
            weights = SavedAdapter(folder, self.record).weights_hash()
            write_checked_json(folder / TESTED, self.tested | {"weights": weights})
        write_report(folder, self.facts, keeps_words=self.keeps_words)

    def describe(self, folder: Path) -> None:
        """Writes the record and the report of the saved version again, with what was found since, file by file."""
        write_report(folder, self.facts, keeps_words=self.keeps_words)
        write_record(folder, self.record)


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
            return save_to(version, version.record, self.out)
        except SebpEdgeError as error:
            message = " ".join(filter(None, [prefix, str(error), self._save_elsewhere(version)]))
            raise StorageError(message) from error

    def _save_in_store(self, version: NewVersion) -> SavedAdapter:
        return self.adapter.save(version, version.record, activate=False, where=version.texts.where)

    def _save_elsewhere(self, version: NewVersion) -> str:
        """Saves into the store if `out` failed, else into the system's temporary folder; says where, in a sentence."""
        if self.out is not None:
            with suppress(SebpEdgeError):
                return f"Instead, {describe_location(self._save_in_store(version))}."
        with suppress(SebpEdgeError):
            folder = Path(tempfile.gettempdir()) / f"sebp-edge-{folder_of(self.name)}-{secrets.token_hex(4)}"
            save_to(version, version.record, folder)
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
