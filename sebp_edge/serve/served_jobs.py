"""Jobs: long work in the worker, one at a time, in the order of their start; states and events are in the journal.

    queued -> starting -> running -> done | refused | interrupted | failed
                          running -> pausing -> paused -> queued
                          running -> cancelling -> interrupted

`refused` is an error that the owner or the app can mend, `failed` one that they cannot. An `interrupted` job was
cancelled, or its process was killed; `resumable` says whether jobs.resume goes on with it.
"""

import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sebp_edge.basics.files import parse_dataclass
from sebp_edge.errors import StorageError
from sebp_edge.events import finite, message
from sebp_edge.serve.journal import MAX_JOBS, Damaged, Journal, set_aside
from sebp_edge.serve.messages import TRAININGS, Refusal, ResumeJobParams, StartJobParams
from sebp_edge.serve.streams import Outbox
from sebp_edge.store.lock import locked

if TYPE_CHECKING:
    from sebp_edge.store.stored_jobs import Job

ENDED = frozenset({"done", "refused", "interrupted", "failed"})
ACTIVE = frozenset({"starting", "running", "pausing", "cancelling"})
MAX_QUEUED = 100
# Events of which the journal keeps less than all, for an app that is here now; those that are read from it at once.
_MAX_RECENT, _EVENTS_AT_ONCE = 200, 100
CANCELLED = {"code": "cancelled", "message": "The job was cancelled.", "hint": "", "retry": False}


@dataclass(frozen=True)
class ServedJob:
    """What is known of a job.

    Attributes:
        id: the app's.
        kind: one of `JOBS`.
        name: the adapter's.
        created, updated: in seconds since 1970.
        phase, progress, seconds_left: of the whole job; progress is from 0 to 1.
        last_event: the number of its last event.
        stored: the same id if `sebp-edge jobs` shows it, too; None if it is no training.
        error: why it was refused, interrupted or failed.
        result: what it returned; after a restart, without texts and paths.
    """

    id: str
    kind: str
    name: str | None
    state: str = "queued"
    created: float = field(default_factory=lambda: round(time.time(), 3))
    updated: float = 0.0
    phase: str = ""
    progress: float = 0.0
    seconds_left: float | None = None
    resumable: bool = False
    last_event: int = 0
    stored: str | None = None
    error: dict | None = None
    result: dict | None = None


class ServedJobs:
    """All jobs of a store.

    Args:
        stored: the store's jobs, which are those that can be gone on with.

    Attributes:
        waiting: what the worker needs for each that waits, in order; never written.
        subscriptions: for each job whose events the app wants, the number of the last one that was sent.
        last_events: of forgotten jobs, the last event, if the app still waits for that.
        damage: the problem with an earlier journal, which was set aside; None if there was none.
    """

    @classmethod
    def open(cls, folder: Path, stored) -> "ServedJobs":
        """Opens the journal in a store's folder, or begins a new one if it is damaged."""
        try:
            return cls(Journal(folder), stored)
        except Damaged:
            with locked(folder):
                with suppress(Damaged):  # another server may have set it aside meanwhile
                    return cls(Journal(folder), stored)
                damage = set_aside(folder)
                jobs = cls(Journal(folder), stored)
        jobs.damage = damage
        return jobs

    def __init__(self, journal: Journal, stored):
        self.journal, self.damage, self._stored = journal, None, stored
        self.waiting: dict[str, dict] = {}
        self.subscriptions: dict[str, int] = {}
        self.last_events: list[dict] = []
        self._jobs: dict[str, ServedJob] = {}
        self._digests: dict[str, bytes] = {}
        self._changed: set[str] = set()
        self._recent: OrderedDict[tuple[str, int], dict] = OrderedDict()
        try:
            for digest, facts in journal.jobs():
                job = parse_dataclass(facts, ServedJob)
                if job.error is not None:  # the journal keeps its code
                    job = replace(job, error={"message": "", "hint": ""} | job.error)
                self._jobs[job.id] = replace(job, last_event=journal.last_number(job.id))
                self._digests[job.id] = digest
        except (ValueError, RecursionError) as error:
            journal.close()
            raise Damaged(str(error)) from error
        for job in [job for job in self._jobs.values() if job.state not in ENDED | {"paused"}]:
            when = "before this job began" if job.state == "queued" else "during this job"
            why = {"code": "killed", "message": f"The server ended {when}.", "hint": "", "retry": True}
            self.change(job.id, "interrupted", error=why, resumable=self.stored(job) is not None)
        for job in list(self._jobs.values())[: max(0, len(self._jobs) - MAX_JOBS)]:
            if job.state in ENDED and not job.resumable:
                self.forget(job.id)
        self.commit()

    def commit(self) -> None:
        """Makes what is known of jobs outlive this process."""
        for id in self._changed:
            self.journal.write_job(id, self._digests[id], asdict(self._jobs[id]))
        self._changed.clear()
        self.journal.commit()

    def started(self, id: str, as_sent: dict) -> ServedJob | None:
        """Returns the job that this request has started before; None if it can start one."""
        if id in self._jobs:
            if self._digests[id] != self.journal.digest(as_sent):
                raise Refusal("id_taken", "Another job has this id.", "Choose a new id for each job.")
            return self._jobs[id]
        if len(self.waiting) >= MAX_QUEUED:
            raise Refusal("busy", f"{MAX_QUEUED} jobs are waiting already.", "Wait for one to end.", retry=True)
        return None

    def start(self, request: StartJobParams, as_sent: dict, name: str | None, params: dict) -> ServedJob:
        """Puts a job into the queue."""
        stored = request.id if request.kind in TRAININGS else None
        self._jobs[request.id] = ServedJob(request.id, request.kind, name, stored=stored)
        self._digests[request.id] = self.journal.digest(as_sent)
        self.change(request.id, "queued")
        if (problem := self.journal.problem) is not None:
            self.forget(request.id)
            raise problem
        self.waiting[request.id] = params
        return self._jobs[request.id]

    def get(self, id: str) -> ServedJob:
        """Returns a job."""
        if id not in self._jobs:
            raise Refusal("unknown_job", "There is no job with this id.", "jobs.list has all jobs.")
        return self._jobs[id]

    def all(self) -> list[ServedJob]:
        """Returns all jobs, oldest first."""
        return list(self._jobs.values())

    def change(self, id: str, state: str, **facts) -> ServedJob:
        """Moves a job into another state, which is an event, and is in the journal before anybody hears of it."""
        job = replace(self._jobs[id], state=state, updated=round(time.time(), 3), **facts)
        self._jobs[id] = job
        shown = {"event": "state", "state": state, "resumable": job.resumable, "error": job.error}
        self.add_event(id, message(shown | ({"result": job.result} if state == "done" else {}), id))
        self.commit()
        return self._jobs[id]

    def add_event(self, id: str, event: dict) -> None:
        """Numbers an event of a job."""
        job, is_progress = self._jobs[id], event["event"] in ("step", "progress")
        if event["event"] == "progress":
            # A job that goes on, or begins again, shows no less than before.
            event = event | {"fraction": max(event["fraction"], job.progress)}
            job = replace(job, phase=event["phase"], progress=event["fraction"], seconds_left=event["seconds_left"])
        self._jobs[id] = job = replace(job, updated=round(time.time(), 3))
        if is_progress and self.journal.is_behind:
            return
        job = self._jobs[id] = replace(job, last_event=job.last_event + 1)
        record = finite(
            {
                "job": id,
                "number": job.last_event,
                "phase": job.phase,
                "progress": job.progress,
                "seconds_left": job.seconds_left,
                "event": event,
            }
        )
        self.journal.write_event(id, job.last_event, record)
        self._changed.add(id)
        if not is_progress:
            self._recent[id, job.last_event] = record
            while len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)

    def stored(self, job: ServedJob) -> "Job | None":
        """Returns what the store has saved of a job; None if it has nothing."""
        return next((one for one in self._stored.list() if one.id == job.stored), None)

    def remove_stored(self, job: ServedJob, *, only_queued: bool = False) -> None:
        """Deletes what the store has of a job; `only_queued` if it was never begun."""
        stored = self.stored(job)
        if stored is not None and (not only_queued or stored.state == "queued"):
            with suppress(StorageError):  # a list of jobs shows what is left
                stored.remove()

    def resume(self, request: ResumeJobParams) -> ServedJob:
        """Queues a job again."""
        self.waiting[request.id] = asdict(request)
        return self.change(request.id, "queued", error=None)

    def cancel(self, job: ServedJob) -> None:
        """Cancels a job that the worker does not have."""
        self.remove_stored(job)
        self.waiting.pop(job.id, None)
        self.change(job.id, "interrupted", error=CANCELLED, resumable=False)

    def next_task(self) -> dict:
        """Takes the first job out of the queue; returns what the worker needs for it."""
        job = self.change(next(iter(self.waiting)), "starting")
        return {"id": job.id, "kind": job.kind, "stored": job.stored, "params": self.waiting.pop(job.id)}

    def events(self, id: str, since: int, limit: int) -> list[dict]:
        """Returns the next events after a number; those of before the last start without names of files."""
        job = self._jobs.get(id)
        if job is None or job.last_event <= since:
            return []
        found = self.journal.events(id, since, limit)
        return [self._recent.get((id, record["number"]), record) for record in found]

    def send_events(self, app: Outbox) -> None:
        """Sends new events, as many as the app keeps up with: the journal has the others."""
        last_events, self.last_events = self.last_events, []
        for event in last_events:
            app.send({"method": "job.event", "params": event})
        for id, sent in self.subscriptions.items():
            while app.has_room and (events := self.events(id, sent, _EVENTS_AT_ONCE)):
                self.commit()  # so that no number that an app has seen is given again
                for event in events:
                    app.send({"method": "job.event", "params": event})
                self.subscriptions[id] = sent = events[-1]["number"]

    def forget(self, id: str) -> None:
        """Deletes all that is known of a job that does not run, but for its last event if that is not sent."""
        last = self._jobs[id].last_event
        if self.subscriptions.pop(id, last) < last:
            self.last_events += self.events(id, last - 1, 1)
        self.journal.forget(id)
        self.journal.commit()
        self._changed.discard(id)
        del self._digests[id], self._jobs[id]
        for key in [key for key in self._recent if key[0] == id]:
            del self._recent[key]

    def forget_adapter(self, name: str, but: str | None = None) -> None:
        """Deletes all that is known of the ended jobs of an adapter, `but` one."""
        for job in self.all():
            if job.name == name and job.state in ENDED and job.id != but:
                self.forget(job.id)
