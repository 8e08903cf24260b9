"""The supervisor: one loop over what the app asks, what the worker tells, and the clock. It has no torch.

Threads only wait: for the app's lines, for the worker's, for whoever reads what is written. All else happens in the
loop, in the main thread, which lives as long as the process and so may start workers.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import psutil

from sebp_edge.basics.children import children
from sebp_edge.basics.parents import wake_when_parent_ends
from sebp_edge.basics.schema import schema_hash
from sebp_edge.basics.version import __version__
from sebp_edge.errors import StorageError
from sebp_edge.events import finite
from sebp_edge.serve.messages import (
    PROTOCOL,
    InitializeParams,
    Refusal,
    StartJobParams,
    TextsParams,
    cancelled,
    cannot_start,
    error_of,
    parse,
    read,
    shown,
)
from sebp_edge.serve.methods import FIRST, HERE, METHODS, PLANNER, WORKER, check_paths, real_path
from sebp_edge.serve.parent_process import Parent
from sebp_edge.serve.processes import Planning, WorkerProcess
from sebp_edge.serve.served_jobs import ACTIVE, ServedJob, ServedJobs
from sebp_edge.serve.streams import Lines, LongLine, Outbox

# The worker has so many seconds to save a job's state when the app is gone, to stop a job, and to pause it.
END_SECONDS, CANCEL_SECONDS, PAUSE_SECONDS = 1.0, 10.0, 30.0
# Requests that a worker has at once, and events that are read from the journal at once.
MAX_REQUESTS, _EVENTS_AT_ONCE = 200, 100
_SECONDS_BETWEEN_LOOKS = 0.25
CANCELLED = {"code": "cancelled", "message": "The job was cancelled.", "hint": "", "retry": False}


class Supervisor:
    """Serves one app.

    Args:
        descriptors: the protocol's, to read and to write.
        starter: see `parents.starter`.

    Attributes:
        folders: those that the app may use.
        jobs: all jobs; None before `initialize`.
    """

    def __init__(self, descriptors: tuple[int, int], starter: int | None):
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._parent = Parent(starter)
        self._outbox = Outbox(descriptors[1], lambda: self._inbox.put(self.end))
        self._lines = Lines(descriptors[0], self._outbox)
        self._children = children()
        self._planning = Planning(self._children)
        self._store_calls: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._settings: InitializeParams | None = None
        self._store = None
        self._store_methods = None  # the module, which is imported late
        self.folders: list[Path] = []
        self.jobs: ServedJobs | None = None
        self._worker: WorkerProcess | None = None
        self._running: str | None = None  # the id of the job that the worker has
        self._kill_at: float | None = None  # if it has not ended the job by then
        self._unanswered: set[str | int] = set()
        self._end_at: float | None = None
        self._wait_in_thread(self._read_app)
        self._wait_in_thread(self._read_plans)

    @staticmethod
    def _wait_in_thread(method, *args) -> None:
        threading.Thread(target=method, args=args, daemon=True).start()

    def run(self) -> None:
        """Serves until the app ends it, or is gone."""
        for signum in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGHUP under nohup
                signal.signal(signum, lambda *_: self._inbox.put(self.end))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the app, which says what becomes of this process
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, lambda *_: self._inbox.put(self._look))
            wake_when_parent_ends(signal.SIGUSR1)
        self._send({"method": "ready", "params": {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}})
        look_at = 0.0
        while self._end_at is None or (self._running and time.monotonic() < self._end_at):
            with suppress(queue.Empty):
                self._inbox.get(timeout=_SECONDS_BETWEEN_LOOKS)()
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            self._start_next_job()
            self._send_events()
        self._finish()

    # ------------------------------------------------------------------------------------------------ what methods do

    def initialize(self, params: InitializeParams) -> dict:
        """Opens the store for an app."""
        if self._settings is not None:
            raise Refusal("already_initialized", "This server has been initialized.", "Start another one.")
        if params.protocol != PROTOCOL:
            message = f"This server speaks version {PROTOCOL} of the protocol, not {params.protocol}."
            raise Refusal("unsupported_version", message, "Update the older of the two.")
        parent = self._parent if params.parent is None else Parent(**_read_parent(params.parent))
        if not parent.is_alive():
            raise Refusal("parent_gone", "The parent process has ended, or another one has its number.")
        folders = [real_path(folder) for folder in params.folders]
        if params.store is not None:
            real_path(str(Path(params.store).absolute()))
        from sebp_edge.serve import store_methods  # after "ready", since it takes as long as all else

        store, self._store_methods = store_methods.open_store(params), store_methods
        jobs = ServedJobs.open(store.folder, store.jobs)
        # Names are not taken for paths beside the app then.
        os.chdir(store.folder)
        self._parent, self._settings, self._store, self.jobs, self.folders = parent, params, store, jobs, folders
        self._wait_in_thread(self._serve_store_methods)
        about = {"protocol": PROTOCOL, "version": __version__, "schema": schema_hash(), "pid": os.getpid()}
        return about | {"methods": sorted(METHODS)}

    def status(self) -> dict:
        """Returns what runs, without waking a worker."""
        worker, size = self._worker, self._worker_memory()
        problem = self.jobs and (self.jobs.journal.problem or self.jobs.damage)
        if worker is not None:
            worker = {"pid": worker.pid, "memory": size, "requests": len(worker.requests)}
        own = psutil.Process().memory_info().rss
        return {
            "pid": os.getpid(),
            "memory": own,
            "worker": worker,
            "job": self._running,
            "queued": len(self.jobs.waiting) if self.jobs else 0,
            "problem": error_of(problem)["data"] if problem else None,
        }

    def keep(self, request: StartJobParams, params: TextsParams) -> tuple[str | None, dict]:
        """Keeps a job for the next server; returns the adapter's name, and what the worker needs."""
        budget = self._settings.memory_budget
        name, needed = self._store_methods.keep_job(self._store, budget, request.id, params)
        return name, asdict(needed)

    def unload(self) -> dict:
        """Ends the worker, unless it runs a job."""
        if self._running is not None:
            raise Refusal("busy", "A job is running.", "Pause or cancel it first.", retry=True)
        self._drop_worker("unloaded", "The worker was ended by unload.")
        return {}

    def pause(self, id: str) -> None:
        """Pauses the running job."""
        self.jobs.change(id, "pausing")
        self._worker.send({"do": "pause job"})
        self._kill_at = time.monotonic() + PAUSE_SECONDS

    def cancel(self, job: ServedJob) -> None:
        """Cancels a job in any state."""
        if job.state in ACTIVE:
            if job.state != "cancelling":
                self.jobs.change(job.id, "cancelling")
                self._worker.send({"do": "stop job"})
                self._kill_at = time.monotonic() + CANCEL_SECONDS
            return
        self.jobs.remove_stored(job)
        self.jobs.waiting.pop(job.id, None)
        self.jobs.change(job.id, "interrupted", error=CANCELLED, resumable=False)

    def cancel_request(self, id: str | int) -> dict:
        """Cancels a request that the worker or a planner has; does nothing if it is answered already."""
        if id in self._planning.requests:
            self._planning.stop(id)
        elif self._worker is not None and id in self._worker.requests:
            self._worker.send({"do": "stop", "id": id})
        return {}

    def end(self) -> dict:
        """Ends this process within `END_SECONDS`."""
        if self._end_at is None:
            self._end_at = time.monotonic() + END_SECONDS
            if self._running is not None:
                export = self.jobs.get(self._running).kind == "export"
                self._worker.send({"do": "stop job" if export else "pause job"})
        return {}

    # ----------------------------------------------------------------------------------------------------- the app

    def _read_app(self) -> None:
        for line in self._lines:
            self._inbox.put(partial(self._handle, line))
        self._inbox.put(self.end)

    def _handle(self, line: bytes | type[LongLine]) -> None:
        id = None
        try:
            if line is LongLine:
                raise Refusal("too_long", "The line is too long.", "Give texts as files.")
            message = read(line)
            id = message["id"]
            if id in self._unanswered:
                raise Refusal("invalid_request", "A request with this id is not answered yet.")
            result = self._call(id, message["method"], message.get("params", {}))
        except Exception as error:
            self._send({"id": id, "error": error_of(error)})
        else:
            if result is not None:
                self._send({"id": id, "result": finite(result)})
        finally:
            self._lines.handled()

    def _call(self, id: str | int, name: str, params: object) -> dict | None:
        if name not in METHODS:
            raise Refusal("unknown_method", f"There is no method {name[:40]!r}.", "initialize lists all methods.")
        if self._settings is None and name not in FIRST:
            raise Refusal("not_initialized", "The first request is initialize.")
        values = parse(METHODS[name], params, name)
        if name in HERE:
            return HERE[name][1](self, values)
        if self._end_at is not None:
            raise Refusal("ending", "The server is ending.", retry=True)
        check_paths(values, self.folders)
        if name in WORKER:
            self._ask_worker(id, name, params)
        elif name in PLANNER:
            self._ask_planner(id, name, params)
        else:
            self._store_calls.put((id, name, values))
        self._unanswered.add(id)
        return None

    def _answer(self, id: str | int, answer: dict) -> None:
        self._unanswered.discard(id)
        self._send({"id": id, **answer})

    def _send(self, message: dict) -> None:
        self._outbox.send({"jsonrpc": "2.0", **message})

    def _send_events(self) -> None:
        """Sends new events of jobs, as many as the reader keeps up with: the journal has the others."""
        if self.jobs is None:
            return
        last_events, self.jobs.last_events = self.jobs.last_events, []
        for event in last_events:
            self._send({"method": "job.event", "params": event})
        for id, sent in self.jobs.subscriptions.items():
            while self._outbox.has_room and (events := self.jobs.events(id, sent, _EVENTS_AT_ONCE)):
                self.jobs.commit()  # so that no number that an app has seen is given again
                for event in events:
                    self._send({"method": "job.event", "params": event})
                self.jobs.subscriptions[id] = sent = events[-1]["number"]

    # ---------------------------------------------------------------------------------------------------- the store

    def _serve_store_methods(self) -> None:
        """Calls the methods about the store."""
        while True:
            id, name, params = self._store_calls.get()
            try:
                answer = {"result": finite(self._store_methods.CALLS[name](self._store, params))}
            except Exception as error:
                answer = {"error": error_of(error)}
            self._inbox.put(partial(self._answer_from_store, id, answer, name, params))

    def _answer_from_store(self, id: str | int, answer: dict, name: str, params: object) -> None:
        if name == "adapters.remove" and params.version is None and "result" in answer:
            self.jobs.forget_adapter(params.name)
            if (problem := self.jobs.journal.problem) is not None:
                problem = StorageError(f"The adapter is removed, but the journal still names it. {problem}")
                answer = {"error": error_of(problem)}
        self._answer(id, answer)

    # ------------------------------------------------------------------------------------------------- the planner

    def _ask_planner(self, id: str | int, method: str, params: dict) -> None:
        self._refuse_too_many(len(self._planning.requests))
        asked = {"method": method, "params": params, "used": self._worker_memory() or 0}
        self._planning.ask(id, asked | self._worker_settings())

    def _read_plans(self) -> None:
        for id, answer in self._planning.answers():
            self._inbox.put(partial(self._answer_plan, id, answer))

    def _answer_plan(self, id: str | int, answer: dict) -> None:
        """Passes an answer on; what is not known without torch is asked of the worker, which no plan wakes."""
        request = self._planning.requests.pop(id)
        if answer == {"asks": "worker"}:
            try:
                if request is None:
                    raise cancelled()
                if request["method"] == "plan" and self._worker is None:
                    message = "This model, or this machine's GPU, is not known here yet, and a plan wakes no worker."
                    raise Refusal("not_known", message, "Call inspect once, which has a plan, too.")
                self._ask_worker(id, request["method"], request["params"])
                return
            except Exception as error:
                answer = {"error": error_of(error)}
        self._answer(id, answer)

    # -------------------------------------------------------------------------------------------------- the worker

    def _need_worker(self) -> WorkerProcess:
        if self._worker is None:
            environment = dict(os.environ)
            if self._settings.offline:
                environment["HF_HUB_OFFLINE"] = "1"
            try:
                self._worker = WorkerProcess(self._children, environment)
            except OSError as error:
                raise cannot_start("worker", error) from error
            self._wait_in_thread(self._read_worker, self._worker)
            settings = self._worker_settings() | {"low_priority": self._settings.low_priority}
            self._worker.send({"do": "settings"} | settings)
        return self._worker

    def _read_worker(self, worker: WorkerProcess) -> None:
        for line in chain(worker.lines, [None]):
            self._inbox.put(partial(self._hear, worker, line))

    def _worker_settings(self) -> dict:
        about = {"store": str(self._store.folder.parent), "memory_budget": self._settings.memory_budget}
        return about | {"folders": [*map(str, self.folders)]}

    def _worker_memory(self) -> int | None:
        """Returns the bytes of host memory that the worker uses; None if there is none."""
        with suppress(psutil.Error):
            return None if self._worker is None else psutil.Process(self._worker.pid).memory_info().rss

    def _ask_worker(self, id: str | int, method: str, params: dict) -> None:
        worker = self._need_worker()
        self._refuse_too_many(len(worker.requests))
        worker.requests.add(id)
        worker.send({"do": "answer", "id": id, "method": method, "params": params})

    @staticmethod
    def _refuse_too_many(waiting: int) -> None:
        if waiting >= MAX_REQUESTS:
            raise Refusal("busy", f"{MAX_REQUESTS} requests are waiting already.", "Wait for an answer.", retry=True)

    def _start_next_job(self) -> None:
        if self.jobs is None or self._running is not None or not self.jobs.waiting or self._end_at is not None:
            return
        task = self.jobs.next_task()
        self._running = task["id"]
        try:
            self._need_worker().send({"do": "job", **task})
        except Refusal as why:
            self._interrupt_job(why)

    def _hear(self, worker: WorkerProcess, line: bytes | None) -> None:
        """Handles what a worker tells."""
        if line is not None:
            worker.handled()
        if worker is not self._worker:  # what one that was killed had still told
            return
        if line is None or line is LongLine:
            self._drop_worker("worker_ended", "The worker ended unexpectedly")
            return
        message = json.loads(line)
        match message["tells"]:
            case "event":
                self.jobs.add_event(self._running, message["event"])
            case "running":
                if self.jobs.get(self._running).state == "starting":
                    self.jobs.change(self._running, "running")
            case "chunk" if self._outbox.has_room:  # the answer has the whole text
                self._send({"method": "text", "params": {"request": message["id"], "text": message["text"]}})
            case "dropped" if message["do"] == "job":
                self._job_ended("interrupted", {"error": CANCELLED})
            case "dropped":
                worker.requests.discard(message["id"])
                self._answer(message["id"], {"error": cancelled().to_dict()})
            case "broken":
                self._drop_worker("worker_broken", f"The worker cannot start: {message['why']}.", retry=False)
            case "answer":
                worker.requests.discard(message["id"])
                self._answer(message["id"], {key: message[key] for key in ("result", "error") if key in message})
            case "ended":
                self._job_ended(message["state"], message["facts"])

    def _job_ended(self, state: str, facts: dict) -> None:
        id, self._running, self._kill_at = self._running, None, None
        was = self.jobs.get(id)
        if state in ("refused", "failed") or was.state == "cancelling":
            self.jobs.remove_stored(was, only_queued=True)
        facts["resumable"] = state != "done" and self.jobs.stored(was) is not None
        if state == "paused":
            self._drop_worker("worker_ended", "The worker was ended to pause a job.")
            if was.state == "cancelling":
                state, facts["error"] = "interrupted", CANCELLED
        job = self.jobs.change(id, state, **facts)
        if job.kind == "forget" and state == "done":
            self.jobs.forget_adapter(job.name, but=id)

    def _drop_worker(self, code: str, message: str, *, retry: bool = True) -> None:
        """Ends the worker. What it had not answered is refused, its job is interrupted."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        how = worker.kill()
        why = Refusal(code, message if message.endswith(".") else f"{message} ({how}).", retry=retry)
        for id in worker.requests:
            self._answer(id, {"error": why.to_dict()})
        if self._running is not None:
            self._interrupt_job(why)

    def _interrupt_job(self, why: Refusal) -> None:
        is_cancelled = self.jobs.get(self._running).state == "cancelling"
        self._job_ended("interrupted", {"error": CANCELLED if is_cancelled else shown(why)})

    # -------------------------------------------------------------------------------------------------- the clock

    def _look(self) -> None:
        """Looks at what ends with time."""
        now = time.monotonic()
        if not self._parent.is_alive():
            self.end()
        if self._kill_at is not None and now >= self._kill_at:
            self._drop_worker("worker_ended", "The worker did not end the job in time, and was killed.")
        worker = self._worker
        if worker and not worker.requests and not self._running and now - worker.used > self._settings.warm_seconds:
            self._drop_worker("unloaded", "The worker was idle.")
        if self.jobs is not None:
            self.jobs.commit()

    def _finish(self) -> None:
        self._drop_worker("ending", "The server is ending.")
        if self.jobs is not None:
            self._send_events()
            self.jobs.commit()
            self.jobs.journal.close()
        self._outbox.drain(0.2)
        sys.stderr.flush()
        os._exit(0)


def _read_parent(given: dict) -> dict:
    pid, started = given.get("pid"), given.get("started")
    if type(pid) is not int or pid <= 0 or not (started is None or isinstance(started, int | float)):
        raise Refusal("invalid_params", "'parent' of 'initialize' has a pid, and started in seconds since 1970.")
    return {"pid": pid, "started": started}
