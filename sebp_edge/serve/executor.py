"""The executor: starts the worker when there is something to do, gives it jobs and requests, and ends it."""

import json
import os
import threading
import time
from dataclasses import asdict
from functools import partial
from itertools import chain
from queue import SimpleQueue

from sebp_edge.basics.children import Children
from sebp_edge.serve.messages import InitializeParams, Refusal, cancelled, cannot_start, shown
from sebp_edge.serve.processes import WorkerProcess, refuse_too_many
from sebp_edge.serve.served_jobs import CANCELLED, ServedJobs
from sebp_edge.serve.streams import LongLine, Outbox

# The worker has so many seconds to stop a job, and to pause it.
CANCEL_SECONDS, PAUSE_SECONDS = 10.0, 30.0


class Executor:
    """Runs jobs, one at a time, and requests in the worker.

    Args:
        inbox: of the supervisor's loop, which makes the calls that are put into it.
        app: gets what the worker answers.

    Attributes:
        settings: those of the app, of which folders may change; a task has those of its time.
        running: the id of the job that the worker has; None if it has none.
    """

    def __init__(
        self, inbox: SimpleQueue, app: Outbox, jobs: ServedJobs, children: Children, settings: InitializeParams
    ):
        self._inbox, self._app, self._jobs, self._children, self.settings = inbox, app, jobs, children, settings
        self.worker: WorkerProcess | None = None
        self.running: str | None = None
        self._kill_at: float | None = None  # if the worker has not ended the job by then

    def ask(self, id: str | int, method: str, params: dict) -> None:
        """Asks the worker, which answers the app."""
        worker = self._need_worker()
        refuse_too_many(worker.requests)
        worker.requests.add(id)
        task = {"do": "answer", "id": id, "method": method, "params": params}
        worker.send(task | {"folders": self.settings.folders})

    def cancel(self, id: str | int) -> None:
        """Cancels a request, if the worker has it."""
        if self.worker is not None and id in self.worker.requests:
            self.worker.send({"do": "stop", "id": id})

    # -------------------------------------------------------------------------------------------------------- jobs

    def start_next_job(self) -> None:
        """Gives the worker the first job that waits, unless it has one."""
        if self.running is not None or not self._jobs.waiting:
            return
        task = self._jobs.next_task()
        self.running = task["id"]
        try:
            self._need_worker().send({"do": "job", **task, "folders": self.settings.folders})
        except Refusal as why:
            self._interrupt_job(why)

    def pause_job(self) -> None:
        """Pauses the job that runs."""
        self._jobs.change(self.running, "pausing")
        self.worker.send({"do": "pause job"})
        self._kill_at = time.monotonic() + PAUSE_SECONDS

    def cancel_job(self) -> None:
        """Cancels the job that runs, once."""
        if self._jobs.get(self.running).state != "cancelling":
            self._jobs.change(self.running, "cancelling")
            if self._jobs.get(self.running).kind == "download":  # which nothing else stops
                self.end_worker("worker_ended", "The worker was ended to cancel a download.")
                return
            self.worker.send({"do": "stop job"})
            self._kill_at = time.monotonic() + CANCEL_SECONDS

    def save_job(self) -> None:
        """Makes the job that runs save its state, if it has one, and end."""
        has_state = self._jobs.get(self.running).stored is not None
        self.worker.send({"do": "pause job" if has_state else "stop job"})

    def _end_job(self, state: str, facts: dict) -> None:
        id, self.running, self._kill_at = self.running, None, None
        was = self._jobs.get(id)
        if state in ("refused", "failed") or was.state == "cancelling":
            self._jobs.remove_stored(was, only_queued=True)
        facts["resumable"] = state != "done" and self._jobs.stored(was) is not None
        if state == "paused":
            self.end_worker("worker_ended", "The worker was ended to pause a job.")
            if was.state == "cancelling":
                state, facts["error"] = "interrupted", CANCELLED
        job = self._jobs.change(id, state, **facts)
        if job.kind == "forget" and state == "done":
            self._jobs.forget_adapter(job.name, but=id)

    def _interrupt_job(self, why: Refusal) -> None:
        is_cancelled = self._jobs.get(self.running).state == "cancelling"
        self._end_job("interrupted", {"error": CANCELLED if is_cancelled else shown(why)})

    # -------------------------------------------------------------------------------------------------- the worker

    def look(self) -> None:
        """Ends a worker that does not end its job in time, or that is idle."""
        now, worker = time.monotonic(), self.worker
        if self._kill_at is not None and now >= self._kill_at:
            self.end_worker("worker_ended", "The worker did not end the job in time, and was killed.")
        elif worker and not worker.requests and not self.running and now - worker.used > self.settings.warm_seconds:
            self.end_worker("unloaded", "The worker was idle.")

    def end_worker(self, code: str, message: str, *, retry: bool = True) -> None:
        """Ends the worker. What it had not answered is refused, its job is interrupted."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        how = worker.kill()
        why = Refusal(code, message if message.endswith(".") else f"{message} ({how}).", retry=retry)
        for id in worker.requests:
            self._app.send({"id": id, "error": why.to_dict()})
        if self.running is not None:
            self._interrupt_job(why)

    def _need_worker(self) -> WorkerProcess:
        if self.worker is None:
            offline = {"HF_HUB_OFFLINE": "1"} if self.settings.offline else {}
            try:
                self.worker = WorkerProcess(self._children, os.environ | offline)
            except OSError as error:
                raise cannot_start("worker", error) from error
            threading.Thread(target=self._read, args=(self.worker,), daemon=True).start()
            self.worker.send({"do": "settings", **asdict(self.settings)})
        return self.worker

    def _read(self, worker: WorkerProcess) -> None:
        for line in chain(worker.lines, [None]):
            self._inbox.put(partial(self._hear, worker, line))

    def _hear(self, worker: WorkerProcess, line: bytes | type[LongLine] | None) -> None:
        """Handles what a worker tells; None is its end."""
        if line is not None:
            worker.handled()
        if worker is not self.worker:  # what one that was killed had still told
            return
        if line is None or line is LongLine:
            self.end_worker("worker_ended", "The worker ended unexpectedly")
            return
        message = json.loads(line)
        match message["tells"]:
            case "event":
                self._jobs.add_event(self.running, message["event"])
            case "loaded":
                worker.loaded = message["loaded"]
            case "running":
                if self._jobs.get(self.running).state == "starting":
                    self._jobs.change(self.running, "running")
            case "chunk" if self._app.has_room:  # the answer has the whole text
                self._app.send({"method": "text", "params": {"request": message["id"], "text": message["text"]}})
            case "dropped" if message["do"] == "job":
                self._end_job("interrupted", {"error": CANCELLED})
            case "dropped":
                worker.requests.discard(message["id"])
                self._app.send({"id": message["id"], "error": cancelled().to_dict()})
            case "broken":
                self.end_worker("worker_broken", f"The worker cannot start: {message['why']}.", retry=False)
            case "answer":
                worker.requests.discard(message["id"])
                self._app.send({key: message[key] for key in ("id", "result", "error") if key in message})
            case "ended":
                self._end_job(message["state"], message["facts"])
