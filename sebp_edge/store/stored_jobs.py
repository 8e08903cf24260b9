"""The jobs of a store: trainings that run, are paused or were interrupted, with what it takes to go on with them.

    <store>/.jobs/<id>/job.json             what was asked for; the only file with paths and names
    <store>/.jobs/<id>/lock                 locked by the process that runs the job
    <store>/.jobs/<id>/known_texts.json     salted hashes of the texts, once they are read
    <store>/.jobs/<id>/documents.json       the splits of the documents, without names
    <store>/.jobs/<id>/checkpoint.json      how far the training is; beside it, tensors (see `training.checkpoint`)

All are readable by their owner only, and deleted when the job ends. The operating system frees the lock when its
process ends, however it ends: no process number can be mistaken for another process's.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sebp_edge.basics import files
from sebp_edge.basics.units import percent
from sebp_edge.errors import AdapterError, JobError, StorageError, suggest
from sebp_edge.machine.politeness import Politeness
from sebp_edge.recipe import Recipe
from sebp_edge.store.folders import JOBS, put_aside, size_of
from sebp_edge.store.known_texts import KnownTexts
from sebp_edge.store.lock import lock_file
from sebp_edge.values.model_reference import ModelReference

CHECKPOINT = "checkpoint.json"
_RECORD, _LOCK = "job.json", "lock"
_FORMAT = 1
# A process that lists jobs holds a lock for an instant.
_WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What a job was asked to do, and what must not change when it goes on.

    Attributes:
        kind: "adapt" or "forget".
        settings: arguments of `Personalizer`: model, recipe, device, memory_budget, seed, me and politeness.
        options: the other arguments of the call.
        texts: the values of each `Folder` that was given, with its absolute path; None if other texts were given.
        begun: when it was begun, in UTC, as an ISO 8601 string.
        state: "queued", "running", "paused" or "interrupted", as it was last written.
        process: the number of the process that ran it last.
        newest: the newest version of the adapter that it knows of. Once there is a newer one, it is of no use.
        fixed: values that were chosen when it was begun.
        progress: how much of it was done when it was paused or stopped, from 0 to 1.
    """

    kind: str
    adapter: str
    settings: dict
    options: dict
    texts: tuple[dict, ...] | None = None
    begun: str = ""
    state: str = "running"
    process: int = 0
    newest: int = 0
    fixed: dict = field(default_factory=dict)
    progress: float = 0.0
    format: int = _FORMAT


def settings_of(
    reference: ModelReference,
    recipe: Recipe,
    device: str | None,
    budget: int | None,
    seed: int,
    me: Sequence[str],
    politeness: Politeness,
) -> dict:
    """Returns the settings of a record; a device of None is chosen when the job is begun."""
    return {
        "model": str(Path(reference.location).absolute()) if reference.has_path else reference.name,
        "recipe": asdict(recipe),
        "device": device,
        "memory_budget": budget,
        "seed": seed,
        "me": list(me),
        "politeness": asdict(politeness),
    }


class Job:
    """A job of a store."""

    def __init__(self, folder: Path, record: JobRecord):
        self.id, self.folder, self.record = folder.name, folder, record

    @property
    def state(self) -> str:
        """Whether it is "running", "paused", "queued", or "interrupted": stopped, killed, or ended by an error."""
        if self.is_running:
            return "running"
        return self.record.state if self.record.state in ("paused", "queued") else "interrupted"

    @property
    def is_running(self) -> bool:
        """Whether a process holds it."""
        try:
            with lock_file(self.folder / _LOCK) as is_free:
                return not is_free
        except OSError:  # deleted meanwhile
            return False

    @property
    def progress(self) -> float:
        """How much of it is done, from 0 to 1: what was told last, or at its checkpoint if it was killed since."""
        with suppress(OSError, ValueError, TypeError):
            return max(self.record.progress, float(files.read_json(self.folder / CHECKPOINT).get("share", 0.0)))
        return self.record.progress

    @property
    def has_checkpoint(self) -> bool:
        """Whether steps of it are saved."""
        return (self.folder / CHECKPOINT).exists()

    def arguments(self) -> dict:
        """Returns the arguments of the `Personalizer` that can go on with it, without the store."""
        values = self.record.settings["recipe"]
        changes = values.get("changes")
        recipe = Recipe.of_record(values) if changes is None else Recipe.load(None).replace(**changes)
        politeness = Politeness(**self.record.settings.get("politeness", {}))
        return self.record.settings | {"recipe": recipe, "politeness": politeness}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which this process runs it.

        Raises:
            JobError: another process does.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        with files.storage_errors("Cannot write to", self.folder):
            (self.folder / _LOCK).touch(mode=0o600)
        while True:
            with lock_file(self.folder / _LOCK) as is_free:
                if is_free:
                    self.update(state="running", process=os.getpid())
                    yield
                    return
            if time.monotonic() > deadline:
                raise JobError(f"The job {self.id!r} is running in another process; wait for it or end it.")
            time.sleep(0.02)

    def update(self, **changes) -> None:
        """Changes values of its record."""
        self.record = dataclasses.replace(self.record, **changes)
        with files.storage_errors("Cannot write to", self.folder):
            files.write_checked_json(self.folder / _RECORD, asdict(self.record))

    def start_over(self) -> None:
        """Deletes its checkpoint, and what was chosen when it was begun."""
        with files.storage_errors("Cannot delete in", self.folder, ""):
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
            self.update(fixed={}, progress=0.0)
            for path in self.folder.iterdir():
                if path.name not in (_RECORD, _LOCK):
                    path.unlink()

    def may_know(self, keys: Mapping[bytes, set[int]]) -> bool:
        """Whether it knows one of these documents, by salt, or it cannot be told."""
        try:
            known = KnownTexts.read(self.folder)
        except AdapterError:
            return True
        if known is None or known.salt not in keys:
            return True
        own = {*known.texts.values(), *known.gone.values()}
        return not own.isdisjoint(f"{key:016x}" for key in keys[known.salt])

    def begins_at(self, versions: Container[int]) -> bool:
        """Whether it learns on from one of these versions, or draws from its splits."""
        return any(self.record.fixed.get(name) in versions for name in ("active", "earlier"))

    def remove(self) -> None:
        """Deletes it; a process that runs it goes on, without checkpoints.

        Raises:
            StorageError: not all of it could be deleted.
        """
        with files.storage_errors("Cannot delete", self.folder, ""), suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(put_aside(self.folder))

    def to_dict(self) -> dict:
        """Returns what a list of jobs shows, as JSON-ready values."""
        record = self.record
        return {
            "id": self.id,
            "kind": record.kind,
            "adapter": record.adapter,
            "state": self.state,
            "progress": round(self.progress, 4),
            "model": record.settings.get("model"),
            "texts": None if record.texts is None else [folder["path"] for folder in record.texts],
            "begun": record.begun,
            "process": record.process,
            "size": size_of(self.folder),
        }


class Jobs:
    """The jobs of a store, by their ids."""

    def __init__(self, store: Path):
        self.folder = store / JOBS

    def list(self, adapter: str | None = None) -> list[Job]:
        """Returns the jobs, of one adapter if it is named, oldest first; leaves out what cannot be read."""
        found = []
        for folder in self._folders():
            with suppress(JobError):
                job = self._read(folder)
                if adapter in (None, job.record.adapter):
                    found.append(job)
        return sorted(found, key=lambda job: (job.record.begun, job.id))

    def damaged(self) -> "list[str]":
        """Returns a sentence about each job that cannot be read."""
        sentences = []
        for folder in self._folders():
            try:
                self._read(folder)
            except JobError as error:
                sentences.append(str(error))
        return sentences

    def get(self, id: str | None = None) -> Job:
        """Returns a job; without an id, the only one that does not run.

        Raises:
            JobError: there is no such job, several do not run, or its record is damaged.
        """
        if id is not None and (folder := self.folder / id) in self._folders():
            return self._read(folder)
        jobs = [job for job in self.list() if not job.is_running]
        if id is not None:
            names = [folder.name for folder in self._folders()]
            raise JobError(f"There is no job {id!r}; {suggest(id, names) if names else 'there are none.'}")
        if len(jobs) == 1:
            return jobs[0]
        if not jobs:
            raise JobError("No training is paused or interrupted.")
        listed = ", ".join(f"{job.id} ({job.record.adapter!r}, {percent(job.progress, 0)})" for job in jobs)
        raise JobError(f"{len(jobs)} trainings are paused or interrupted; name one of {listed}.")

    def remove(self, id: str) -> None:
        """Deletes a job, also one whose record is damaged.

        Raises:
            JobError: there is no such job, or it is running.
            StorageError: not all of it could be deleted.
        """
        if (folder := self.folder / id) not in self._folders():
            self.get(id)
        job = Job(folder, JobRecord(kind="", adapter="", settings={}, options={}))
        if job.is_running:
            raise JobError(f"The job {id!r} is running; end that first.")
        job.remove()

    def begin(self, record: JobRecord, id: str) -> Job:
        """Makes a job.

        Raises:
            JobError: there is one of this id.
            StorageError: it could not be written.
        """
        folder = self.folder / id
        if folder.exists():
            raise JobError(f"There is a job {id!r} already; choose another id.")
        with files.storage_errors("Cannot write to", self.folder):
            files.make_private(self.folder.parent)
            files.make_private(self.folder)
            folder.mkdir(mode=0o700)
        job = Job(folder, dataclasses.replace(record, begun=datetime.now(UTC).isoformat(timespec="microseconds")))
        try:
            with files.storage_errors("Cannot write to", self.folder):
                (folder / _LOCK).touch(mode=0o600)
            job.update()
        except StorageError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return job

    def remove_older(self, adapter: str, version: int) -> None:
        """Deletes the jobs of an adapter that do not run and do not know of this version."""
        self._remove(job for job in self.list(adapter) if job.record.newest < version and not job.is_running)

    def remove_begun_at(self, adapter: str, versions: "list[int] | None") -> None:
        """Deletes the jobs of an adapter that begin at one of these versions; None deletes all."""
        self._remove(job for job in self.list(adapter) if versions is None or job.begins_at(versions))

    def remove_knowing(self, adapter: str, keys: Mapping[bytes, set[int]]) -> None:
        """Deletes the jobs of an adapter that may know one of these documents, but for those that this process runs."""
        own = [job for job in self.list(adapter) if not (job.record.process == os.getpid() and job.is_running)]
        self._remove(job for job in own if job.may_know(keys))

    def rename(self, adapter: str, new_name: str) -> None:
        """Gives the jobs of an adapter its new name."""
        for job in self.list(adapter):
            job.update(adapter=new_name)

    def _remove(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.state != "queued":  # which knows nothing yet
                job.remove()

    def _folders(self) -> "list[Path]":
        with files.storage_errors("Cannot read", self.folder, ""):
            if not self.folder.is_dir():
                return []
            return [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(".")]

    @staticmethod
    def _read(folder: Path) -> Job:
        try:
            return Job(folder, files.parse_dataclass(files.read_checked_json(folder / _RECORD), JobRecord))
        except (OSError, ValueError) as error:
            raise JobError(
                f"The job {folder.name!r} is damaged, or was written by another sebp-edge; `sebp-edge jobs remove "
                f"{folder.name}` deletes it."
            ) from error
