"""An adaptation as a job of the store: what it begins with, what it goes on from, and how it ends."""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from sebp_edge.basics.files import expand_user, flush, parse_dataclass, storage_errors
from sebp_edge.basics.stopping import PauseRequested
from sebp_edge.basics.units import are, percent, plural, some
from sebp_edge.basics.version import __version__
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.training.checkpoint import CheckpointFiles, RunState
from sebp_edge.errors import AdapterError, JobError, NonFiniteLoss, Paused, StorageError, TextsChanged
from sebp_edge.events import JobStarted, Notice
from sebp_edge.machine import devices
from sebp_edge.machine.packages import package_versions
from sebp_edge.recipe import Recipe
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.saving import Place, describe_resumption
from sebp_edge.run.start import latest_history, version_with_history
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.known_texts import KNOWN_TEXTS, KnownTexts
from sebp_edge.store.saved import DOCUMENTS
from sebp_edge.store.stored_jobs import Job, JobRecord, settings_of
from sebp_edge.store.version_documents import Entry, read_history, write_history
from sebp_edge.values.documents import printable
from sebp_edge.values.example import Example
from sebp_edge.values.folder import Folder
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory

# The most documents that an error names.
_NAMED = 5
_OVER = "start over with --changed again (changed='again')"


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What was chosen when a training began, and stays when it goes on.

    Attributes:
        salt: of the hashes of its documents, as hexadecimal digits.
        earlier: the version whose splits it draws from; None for none.
        active: the version that was active; None for none.
        recipe, options: how it trains; a plan made now could choose others.
        peak: the peak memory that the plan predicted; None without a plan.
        examples: a salted digest of all examples.
        packages: the versions of sebp-edge and of the libraries that it computes with.
        lists: a salted digest of the job's lists of texts and documents.
    """

    salt: str
    recipe: dict
    options: dict
    fingerprint: str
    examples: str
    packages: dict
    lists: str = ""
    earlier: int | None = None
    active: int | None = None
    peak: int | None = None


@dataclass
class Resumed:
    """What a training goes on from.

    Attributes:
        state: how far it is; None if nothing is saved of it.
        known: the texts that it knows.
        texts: the hashes of those that it trains on, in the order of their numbers in `state`.
        gone: the keys of those that it goes on without, by their hashes.
    """

    fixed: Fixed
    state: RunState | None
    known: KnownTexts
    texts: list[str]
    gone: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return Recipe.of_record(self.fixed.recipe)

    @property
    def options(self) -> MemoryOptions:
        return parse_dataclass(self.fixed.options, MemoryOptions)


class AdaptationJob:
    """The job of one adaptation.

    Args:
        job: the job; None for an adaptation that cannot be resumed.
        changed: what to do if texts have changed, "refuse" or "without": see `Personalizer.resume`.

    Attributes:
        files: its checkpoint's files; None without a job.
        resumed: what it goes on from; None at its beginning.
    """

    def __init__(self, store: AdapterStore, job: Job | None, changed: str = "refuse"):
        self._store, self.job, self._changed = store, job, changed
        self.files = None if job is None else CheckpointFiles(job.folder)
        self.resumed = self._read() if job is not None and job.record.fixed else None
        self._is_new = job is not None and not job.record.process
        self._is_over = False
        self._earlier: int | None = None
        self._active: int | None = None

    @classmethod
    def begin(cls, call: ModelCall, place: Place, kind: str, options: dict, texts) -> "AdaptationJob":
        """Begins a job, unless the adapter is saved outside the store.

        Args:
            kind, options: see `JobRecord`.
        """
        if place.out is not None:
            return cls(call.store, None)
        budget, politeness = call.budget and call.budget.size, call.giving_way.recorded
        settings = settings_of(call.reference, call.recipe, call.device.type, budget, call.seed, call.me, politeness)
        adapter = place.adapter
        record = JobRecord(
            kind=kind,
            adapter=place.name,
            settings=settings,
            options=options,
            texts=_given(texts),
            newest=max(adapter.versions()) if adapter.exists() else 0,
        )
        return cls(call.store, call.store.jobs.begin(record, call.job.id))

    @contextmanager
    def running(self, call: ModelCall) -> Iterator[None]:
        """Context in which the adaptation runs; deletes the job at its end, unless it can be gone on with.

        Raises:
            Paused: a pause was requested.
            JobError: another process runs the job.
        """
        if self.job is None:
            yield
            return
        before, is_paused, handled = self.job.record.state, False, sys.exception()
        with self._deleting_at_the_end(), self.job.held():
            try:
                call.signal.can_pause = True
                self._announce(call)
                yield
                self.end()
            except PauseRequested as request:
                is_paused = True
                devices.clear_frames(request, handled)
            except BaseException as error:
                self._keep_or_end(error, before, call.job.fraction)
                raise
            finally:
                call.signal.can_pause = False
            # Not in the handler, since the request's frames hold the model.
            if is_paused:
                self.job.update(state="paused", progress=call.job.fraction)
                call.in_use.release()
                gc.collect()  # models have circles
                devices.release_memory(call.device)
        if is_paused:
            how = describe_resumption(call.store, self.job.id)
            raise Paused(f"Paused at {percent(self.job.progress, 0)}. To go on: {how}", job=self.job.id)

    def end(self) -> None:
        """Ends the job: its adapter is saved, or there was nothing to learn. It is deleted.

        Where a file that is open cannot be deleted, it is once the job is not held.
        """
        self._is_over = True
        self._delete()

    def survives(self, version: int) -> None:
        """Remembers that the best state so far is saved as a version; the job stays, and can go on."""
        self._is_new = False
        if self.job is not None and self.job.folder.is_dir():
            self.job.update(newest=version)

    @property
    def can_go_on(self) -> bool:
        """Whether steps of it are saved."""
        return self.job is not None and self.job.has_checkpoint

    @property
    def way_to_go_on(self) -> str:
        """How to go on with it, as the end of a sentence; empty without a job."""
        if self.job is None:
            return ""
        return f" go on with the training: {describe_resumption(self._store, self.job.id)}"

    # ------------------------------------------------------------------------------------------------------- the texts

    def history(self, adapter: Adapter, own: SplitHistory | None = None) -> SplitHistory:
        """Returns the history that the splits are drawn from.

        Args:
            own: the one to draw from, if it is not an earlier version's.
        """
        self._active, resumed = adapter.active(), self.resumed
        if resumed is None:
            self._earlier = version_with_history(adapter) if own is None else None
            return latest_history(adapter) if own is None else own
        fixed, salt = resumed.fixed, bytes.fromhex(resumed.fixed.salt)
        if self._active != fixed.active:
            was, now = (f"version {each}" if each else "no version" for each in (fixed.active, self._active))
            raise JobError(
                f"The training began when {was} of the adapter {adapter.name!r} was active, and {now} is now; activate "
                f"that again, or {_OVER}."
            )
        history = own or SplitHistory(salt=salt)
        if fixed.earlier is not None:
            try:
                history = adapter.document_list(fixed.earlier)
            except AdapterError:
                history = None
            if history is None:
                raise JobError(
                    f"The training began with version {fixed.earlier}, which is not there any more; {_OVER}."
                )
        if history.salt != salt:
            raise JobError(f"The training began with other versions of the adapter than there are now; {_OVER}.")
        self._earlier = fixed.earlier
        return history

    def same_texts(self, reading: Reading, call: ModelCall) -> Reading:
        """Returns the documents that the job knows, in its order; all of them at its beginning."""
        resumed = self.resumed
        if resumed is None:
            return reading
        texts, known = resumed.texts, resumed.known.texts
        here = {document.hash(resumed.known.salt): document for document in reading.documents}
        there = [text for text in texts if text in here]
        new, missing = [here[text].source for text in here.keys() - texts], len(texts) - len(there)
        if missing and self._changed != "without":
            raise _texts_changed(missing, len(texts), sorted(new))
        if missing:
            call.notify(Notice(f"The training goes on without {plural(missing, 'document')} that changed or went."))
            if resumed.state is not None:
                number_of = {text: number for number, text in enumerate(there)}
                numbers = {number: number_of[text] for number, text in enumerate(texts) if text in number_of}
                resumed.state = resumed.state.renumbered(numbers)
        if new:
            came = f"{plural(len(new), 'document')} that came since"
            call.notify(Notice(f"{came} {are(len(new))} left for the next time."))
        resumed.gone = {text: key for text, key in known.items() if text not in set(there)}
        return replace(reading, documents=[here[text] for text in there])

    def drawn_from(self, history: SplitHistory) -> SplitHistory:
        """Returns what the splits are drawn from: the job's own, without the documents that are gone, if some are."""
        if not self.has_lost_texts:
            return history
        return read_history(self.job.folder).without({int(key, 16) for key in self.resumed.gone.values() if key})

    @property
    def has_lost_texts(self) -> bool:
        """Whether it goes on without documents."""
        return self.resumed is not None and bool(self.resumed.gone)

    def known_by(self, texts: VersionTexts) -> VersionTexts:
        """Returns what the version knows: what it has learnt before documents went, too."""
        if not self.has_lost_texts:
            return texts
        before = read_history(self.job.folder)
        left = {document.split for document in texts.history.known}
        if lost := {document.split for document in before.known} - left:
            raise JobError(f"Without the documents that are gone, none is left in the split {min(lost)!r}; {_OVER}.")
        known = replace(texts.known, gone={**texts.known.gone, **self.resumed.gone})
        return replace(texts, history=texts.history.learnt_on_from(before), known=known)

    # ---------------------------------------------------------------------------------------------------- the training

    def fix(
        self,
        call: ModelCall,
        texts: VersionTexts,
        examples: Iterable[Example],
        fingerprint: str,
        recipe: Recipe,
        options: MemoryOptions,
        peak: int | None,
    ) -> None:
        """Writes what the training begins with; if it goes on, checks that it is the same."""
        if self.job is None:
            return
        salt = texts.known.salt
        fixed = Fixed(
            salt=salt.hex(),
            recipe=asdict(recipe),
            options=asdict(options),
            fingerprint=fingerprint,
            examples=_digest(examples, salt),
            packages={"sebp-edge": __version__} | package_versions(),
            earlier=self._earlier,
            active=self._active,
            peak=peak,
        )
        # The numbers of documents in a checkpoint are their places in this list.
        self.files.values = {"texts": list(texts.known.texts)}
        if self.resumed is not None:
            self._compare(fixed, call)
            return
        folder = self.job.folder
        with storage_errors("Cannot write to", folder):
            texts.known.write(folder)
            own = {document.key: Entry() for document in texts.history.documents}
            write_history(folder, texts.history, own)
            for name in (KNOWN_TEXTS, DOCUMENTS):
                (folder / name).chmod(0o600)
                flush(folder / name)
            fixed = replace(fixed, lists=_digest_of_lists(folder, salt))
        settings = self.job.record.settings | {"recipe": asdict(call.recipe)}
        self.job.update(settings=settings, fixed=asdict(fixed))

    @contextmanager
    def _deleting_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._is_over:
                self._delete()

    def _delete(self) -> None:
        if self.job is not None:
            with suppress(StorageError):  # a newer version of the adapter, or a list of jobs, shows what is left
                self.job.remove()

    def _read(self) -> Resumed:
        folder, damaged = self.job.folder, f"The job {self.job.id!r} is damaged; {_OVER}."
        try:
            fixed = parse_dataclass(self.job.record.fixed, Fixed)
        except ValueError as error:
            raise JobError(damaged) from error
        version = fixed.packages.get("sebp-edge")
        if version != __version__:
            raise JobError(f"The training was begun by sebp-edge {version}, and this is {__version__}; {_OVER}.")
        try:
            found, known = _digest_of_lists(folder, bytes.fromhex(fixed.salt)), KnownTexts.read(folder)
        except (OSError, ValueError, AdapterError) as error:
            raise JobError(damaged) from error
        if found != fixed.lists:
            raise JobError(damaged)
        state = self.files.read()
        return Resumed(fixed, state, known, self.files.values.get("texts") or list(known.texts))

    def _compare(self, now: Fixed, call: ModelCall) -> None:
        fixed = self.resumed.fixed
        if now.fingerprint != fixed.fingerprint:
            raise JobError(f"The base model has other weights than when the training began; {_OVER}.")
        if now.examples != fixed.examples and not self.resumed.gone:
            raise JobError(f"The texts are tokenised otherwise than when the training began; {_OVER}.")
        for name, version in now.packages.items():
            if (before := fixed.packages.get(name)) != version:
                call.notify(Notice(f"The training began with {name} {before} and goes on with {version}."))

    def _announce(self, call: ModelCall) -> None:
        """Says that the job begins or goes on, and that another one of the adapter could go on."""
        record, store = self.job.record, call.store
        store.jobs.remove_older(record.adapter, record.newest)
        call.notify(JobStarted(self.job.id, self.job.progress))
        if not (self._is_new or self.can_go_on):
            call.notify(Notice("No steps of this training are saved, so that it starts from its beginning."))
        for other in store.jobs.list(record.adapter) if self._is_new else ():
            if not other.is_running:
                call.notify(
                    Notice(
                        f"A training of {record.adapter!r} is {other.state} at {percent(other.progress, 0)}; this one "
                        f"takes its place once it is saved. To go on with it instead: "
                        f"{describe_resumption(store, other.id)}"
                    )
                )

    def _keep_or_end(self, error: BaseException, before: str, progress: float) -> None:
        """Deletes the job after an error if nothing could go on from it; else leaves it as it was."""
        if isinstance(error, NonFiniteLoss) or (self._is_new and not self.can_go_on):
            self.end()
        elif self.job.folder.is_dir():
            self.job.update(state=before if before == "paused" else self.job.record.state, progress=progress)


def _given(texts) -> tuple[dict, ...] | None:
    """Returns the files and folders that were given as texts: see `JobRecord.texts`."""
    if isinstance(texts, Reading):
        texts = texts.folders
    items = [texts] if isinstance(texts, Path | Folder) else texts if isinstance(texts, list | tuple) else []
    if not items or not all(isinstance(item, Path | Folder) for item in items):
        return None
    folders = (item if isinstance(item, Folder) else Folder(item) for item in items)
    return tuple(asdict(folder) | {"path": str(expand_user(folder.path).absolute())} for folder in folders)


def _digest(examples: Iterable[Example], salt: bytes) -> str:
    digest = blake2b(digest_size=16, key=salt)
    for example in examples:
        digest.update(f"{len(example.input_ids)} {example.document};".encode())
        digest.update(example.input_ids.tobytes() + example.labels.tobytes())
    return digest.hexdigest()


def _digest_of_lists(folder: Path, salt: bytes) -> str:
    digest = blake2b(digest_size=16, key=salt)
    for name in (KNOWN_TEXTS, DOCUMENTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _texts_changed(missing: int, known: int, new: list[str]) -> TextsChanged:
    names = tuple(map(printable, new))
    found = f" New or changed {are(len(names))} {some([*map(repr, names)], _NAMED)}." if names else ""
    return TextsChanged(
        f"Of the {plural(known, 'document')} that the training knows, {missing} {are(missing)} not there as they were."
        f"{found} Restore them, go on without them with --changed without (changed='without'), or {_OVER}.",
        names,
        missing,
    )
