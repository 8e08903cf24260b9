"""The processes of the supervisor: a worker with torch, and short ones without it that plan and inspect."""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Sized
from contextlib import suppress
from dataclasses import asdict

import psutil

from sebp_edge.basics.children import PIPES, Children
from sebp_edge.serve.messages import InitializeParams, Refusal, cancelled, cannot_start
from sebp_edge.serve.parent_process import command_of
from sebp_edge.serve.streams import Lines, Outbox

# Requests that a worker has at once, and planners.
MAX_REQUESTS = 200


def refuse_too_many(requests: Sized) -> None:
    """Refuses another request while so many wait."""
    if len(requests) >= MAX_REQUESTS:
        raise Refusal("busy", f"{MAX_REQUESTS} requests are waiting already.", "Wait for an answer.", retry=True)


class Planning:
    """Plans and inspects, each in a short process, one after the other.

    Whoever takes the answers starts them, in a thread that lives as long as the supervisor: see
    `parents.end_with_parent`.

    Attributes:
        requests: those whose answer nobody has taken from here, by their `id`; None for one that is stopped.
    """

    def __init__(self, children: Children, settings: InitializeParams):
        self._children, self.settings = children, settings
        self._waiting: queue.SimpleQueue[str | int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.requests: dict[str | int, dict | None] = {}
        self._current: tuple[str | int, subprocess.Popen] | None = None

    def ask(self, id: str | int, method: str, params: dict, used: int) -> None:
        """Puts a request behind those that wait; the worker uses so many bytes of memory."""
        refuse_too_many(self.requests)
        self.requests[id] = {"method": method, "params": params, "used": used, **asdict(self.settings)}
        self._waiting.put(id)

    def stop(self, id: str | int) -> None:
        """Stops a request: then its answer says so, if it has none yet."""
        with self._lock:
            self.requests[id] = None
            if self._current is not None and self._current[0] == id:
                self._children.kill(self._current[1])

    def answers(self) -> Iterator[tuple[str | int, dict]]:
        """Yields the `id` of each request and its answer, without an end."""
        while True:
            id = self._waiting.get()
            request = self.requests[id]
            try:
                process = self._start(id)
                answer = _read(process.communicate(json.dumps(request).encode())[0]) if process else {}
            except OSError as error:  # no memory for a process, or too many of them
                answer = {"error": cannot_start("planner", error).to_dict()}
            with self._lock:
                is_stopped, self._current = self.requests[id] is None, None
            yield id, {"error": cancelled().to_dict()} if is_stopped else answer

    def _start(self, id: str | int) -> subprocess.Popen | None:
        with self._lock:
            if self.requests[id] is None:
                return None
            process = self._children.start([*command_of("plans", "planner"), str(os.getpid())], **PIPES)
            self._current = id, process
            return process


def _read(written: bytes) -> dict:
    try:
        return json.loads(written)
    except ValueError:  # it was killed, for example since the machine has no memory left
        return {"error": Refusal("worker_ended", "The planner ended unexpectedly.", retry=True).to_dict()}


class WorkerProcess:
    """A running worker: one process with torch, started when it is needed.

    Must be made in a thread that lives as long as the supervisor: see `parents.end_with_parent`.

    Attributes:
        lines: what it tells, up to its end.
        requests: the `id`s of requests that it has not answered.
        loaded: the model that it has loaded, as it has told; None without one.
        used: when it was last given work or answered, as `time.monotonic` has it.
    """

    def __init__(self, children: Children, environment: dict[str, str]):
        self._children = children
        self._process = children.start([*command_of("works", "worker"), str(os.getpid())], env=environment, **PIPES)
        self.pid = self._process.pid
        self.lines = Lines(os.dup(self._process.stdout.fileno()))
        self._outbox = Outbox(os.dup(self._process.stdin.fileno()), lambda: None)
        self._process.stdin.close()
        self._process.stdout.close()
        self.requests: set[str | int] = set()
        self.loaded: dict | None = None
        self.used = time.monotonic()

    @property
    def memory(self) -> int | None:
        """The bytes of host memory that it uses; None if it has ended."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss

    def send(self, message: dict) -> None:
        """Sends it a message; never blocks, even if it is stopped."""
        self._outbox.send(message)
        self.used = time.monotonic()

    def handled(self) -> None:
        """Says that one of its lines was dealt with."""
        self.lines.handled()
        self.used = time.monotonic()

    def kill(self) -> int:
        """Ends it and its own children at once; returns how it ended. Its memory is free then."""
        self._outbox.close()
        return self._children.kill(self._process)
