"""The supervisor: one loop over what the app asks, what the worker tells, and the clock. It has no torch.

Threads only wait: for the app's lines, for the worker's, for whoever reads what is written. All else happens in the
loop, in the main thread, which lives as long as the process and so may start workers.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sebp_edge.basics.children import children
from sebp_edge.basics.parents import wake_when_parent_ends
from sebp_edge.basics.schema import schema_hash
from sebp_edge.basics.version import __version__
from sebp_edge.errors import StorageError
from sebp_edge.events import finite
from sebp_edge.serve.executor import Executor
from sebp_edge.serve.messages import PROTOCOL, InitializeParams, Refusal, cancelled, error_of, parse, read
from sebp_edge.serve.methods import FIRST, HERE, METHODS, PLANNER, SEARCH, WORKER, check_paths, real_path
from sebp_edge.serve.parent_process import Parent
from sebp_edge.serve.processes import Planning
from sebp_edge.serve.served_jobs import ServedJobs
from sebp_edge.serve.streams import JsonRpcOutbox, Lines, LongLine

if TYPE_CHECKING:
    from sebp_edge.serve.store_methods import ServedStore

# The worker has so many seconds to save a job's state when the app is gone.
END_SECONDS = 1.0
_SECONDS_BETWEEN_LOOKS = 0.25


class Supervisor:
    """Serves one app.

    Args:
        descriptors: the protocol's, to read and to write.

    Attributes:
        store, jobs, executor: who does what the app asks; None before `initialize`.
        planning: for plans and inspections, and for searches, which do not wait for those.
    """

    def __init__(self, descriptors: tuple[int, int], starter: int | None):
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._parent = Parent(starter)
        self._app = JsonRpcOutbox(descriptors[1], lambda: self._inbox.put(self.end))
        self._lines = Lines(descriptors[0], self._app)
        self._children = children()
        self.folders: list[Path] = []
        self.store: ServedStore | None = None
        self.jobs: ServedJobs | None = None
        self.planning: tuple[Planning, ...] = ()
        self.executor: Executor | None = None
        self._end_at: float | None = None
        self._in_thread(self._handle, chain(self._lines, [None]))

    def _in_thread(self, handle, items: Iterable) -> None:
        """Puts a call for each item into the inbox, in a thread that waits for them."""

        def wait() -> None:
            for item in items:
                self._inbox.put(partial(handle, item))

        threading.Thread(target=wait, daemon=True).start()

    def run(self) -> None:
        """Serves until the app ends it, or is gone."""
        for signum in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGHUP under nohup
                signal.signal(signum, lambda *_: self._inbox.put(self.end))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the app, which says what becomes of this process
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, lambda *_: self._inbox.put(self._look))
            wake_when_parent_ends(signal.SIGUSR1)
        ready = {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}
        self._app.send({"method": "ready", "params": ready})
        look_at = 0.0
        while self._end_at is None or (self._job is not None and time.monotonic() < self._end_at):
            with suppress(queue.Empty):
                self._inbox.get(timeout=_SECONDS_BETWEEN_LOOKS)()
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            if self.executor is not None:
                if self._end_at is None:
                    self.executor.start_next_job()
                self.jobs.send_events(self._app)
        self._finish()

    @property
    def _job(self) -> str | None:
        """The id of the job that runs."""
        return self.executor and self.executor.running

    # ------------------------------------------------------------------------------------------------ what methods do

    def initialize(self, params: InitializeParams) -> dict:
        """Opens the store for an app."""
        if self.executor is not None:
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
        from sebp_edge.serve.store_methods import ServedStore  # after "ready", since it takes as long as all else

        store = ServedStore(params)
        folder = store.adapters.folder
        jobs = ServedJobs.open(folder, store.adapters.jobs)
        # Names are not taken for paths beside the app then.
        os.chdir(folder)
        self._parent, self.store, self.jobs, self.folders = parent, store, jobs, folders
        settings = replace(params, store=str(folder.parent), folders=tuple(map(str, folders)))
        self.planning = Planning(self._children, settings), Planning(self._children, settings)
        self.executor = Executor(self._inbox, self._app, jobs, self._children, settings)
        self._in_thread(self._answer_from_store, store.answers())
        for planning in self.planning:
            self._in_thread(partial(self._answer_plan, planning), planning.answers())
        about = {"protocol": PROTOCOL, "version": __version__, "schema": schema_hash(), "pid": os.getpid()}
        return about | {"methods": sorted(METHODS)}

    def status(self) -> dict:
        """Returns what runs, without waking a worker."""
        worker = self.executor and self.executor.worker
        problem = self.jobs and (self.jobs.journal.problem or self.jobs.damage)
        return {
            "pid": os.getpid(),
            "memory": psutil.Process().memory_info().rss,
            "worker": worker and {"pid": worker.pid, "memory": worker.memory, "requests": len(worker.requests)},
            "job": self._job,
            "queued": len(self.jobs.waiting) if self.jobs else 0,
            "problem": error_of(problem)["data"] if problem else None,
        }

    def cancel(self, id: str | int) -> dict:
        """Cancels a request that the worker or a planner has; does nothing if it is answered already."""
        for planning in self.planning:
            if id in planning.requests:
                planning.stop(id)
                return {}
        self.executor.cancel(id)
        return {}

    def end(self) -> dict:
        """Ends this process within `END_SECONDS`."""
        if self._end_at is None:
            self._end_at = time.monotonic() + END_SECONDS
            if self._job is not None:
                self.executor.save_job()
        return {}

    # ----------------------------------------------------------------------------------------------------- requests

    def _handle(self, line: bytes | type[LongLine] | None) -> None:
        """Answers a line of the app's, or lets others answer it later; None is the end of its lines."""
        if line is None:
            self.end()
            return
        id = None
        try:
            if line is LongLine:
                raise Refusal("too_long", "The line is too long.", "Give texts as files.")
            message = read(line)
            id = message["id"]
            if self._is_unanswered(id):
                raise Refusal("invalid_request", "A request with this id is not answered yet.")
            result = self._call(id, message["method"], message.get("params", {}))
        except Exception as error:
            self._app.send({"id": id, "error": error_of(error)})
        else:
            if result is not None:
                self._app.send({"id": id, "result": finite(result)})
        finally:
            self._lines.handled()

    def _call(self, id: str | int, name: str, params: object) -> dict | None:
        if name not in METHODS:
            raise Refusal("unknown_method", f"There is no method {name[:40]!r}.", "initialize lists all methods.")
        if self.executor is None and name not in FIRST:
            raise Refusal("not_initialized", "The first request is initialize.")
        values = parse(METHODS[name], params, name)
        if name in HERE:
            return HERE[name][1](self, values)
        if self._end_at is not None:
            raise Refusal("ending", "The server is ending.", retry=True)
        check_paths(values, self.folders)
        worker = self.executor.worker
        if name in WORKER or (worker and name in SEARCH):
            self.executor.ask(id, name, params)
        elif name in SEARCH or name in PLANNER:
            self.planning[name in SEARCH].ask(id, name, params, (worker and worker.memory) or 0)
        else:
            self.store.ask(id, name, values)
        return None

    def _is_unanswered(self, id: str | int) -> bool:
        if self.executor is None:
            return False
        worker = self.executor.worker
        waiting = [self.store.requests, *(each.requests for each in self.planning), worker.requests if worker else ()]
        return any(id in requests for requests in waiting)

    def _answer_from_store(self, answered: tuple[str | int, dict]) -> None:
        id, answer = answered
        name, params = self.store.requests.pop(id)
        if name == "health" and "result" in answer:
            answer["result"]["loaded"] = self.executor.worker and self.executor.worker.loaded
        if name == "adapters.remove" and params.version is None and "result" in answer:
            self.jobs.forget_adapter(params.name)
            if (problem := self.jobs.journal.problem) is not None:
                problem = StorageError(f"The adapter is removed, but the journal still names it. {problem}")
                answer = {"error": error_of(problem)}
        self._app.send({"id": id, **answer})

    def _answer_plan(self, planning: Planning, answered: tuple[str | int, dict]) -> None:
        """Passes an answer on; what is not known without torch is asked of the worker, which no plan wakes."""
        id, answer = answered
        request = planning.requests.pop(id)
        if answer == {"asks": "worker"}:
            try:
                if request is None:
                    raise cancelled()
                if request["method"] == "plan" and self.executor.worker is None:
                    message = "This model, or this machine's GPU, is not known here yet, and a plan wakes no worker."
                    raise Refusal("not_known", message, "Call inspect once, which has a plan, too.")
                self.executor.ask(id, request["method"], request["params"])
                return
            except Exception as error:
                answer = {"error": error_of(error)}
        self._app.send({"id": id, **answer})

    # -------------------------------------------------------------------------------------------------- the clock

    def _look(self) -> None:
        """Looks at what ends with time."""
        if not self._parent.is_alive():
            self.end()
        if self.executor is not None:
            self.executor.look()
            self.jobs.commit()

    def _finish(self) -> None:
        if self.executor is not None:
            self.executor.end_worker("ending", "The server is ending.")
            self.jobs.send_events(self._app)
            self.jobs.commit()
            self.jobs.journal.close()
        self._app.drain(0.2)
        sys.stderr.flush()
        os._exit(0)


def _read_parent(given: dict) -> dict:
    pid, started = given.get("pid"), given.get("started")
    if type(pid) is not int or pid <= 0 or not (started is None or isinstance(started, int | float)):
        raise Refusal("invalid_params", "'parent' of 'initialize' has a pid, and started in seconds since 1970.")
    return {"pid": pid, "started": started}
