"""What the supervisor wants done, as the worker has it."""

import json
import os
import threading
from collections import deque

from sebp_edge.serve.streams import Lines, Outbox


class Tasks:
    """Tasks, received in a thread, so that stops take effect while another task runs, and while torch is imported.

    Args:
        outbox: is told in that thread of a task that was stopped before it began.

    Attributes:
        stops: for each request that waits or is answered, the event that stops it.
        answering: the request that is answered within a job; one that stops or is paused does not wait for the answer.
    """

    def __init__(self, descriptor: int, outbox: Outbox):
        self._waiting: deque[dict] = deque()
        self._changed = threading.Condition()
        self._outbox = outbox
        self.stops: dict[str | int, threading.Event] = {}
        self.job_stop, self.job_pause = threading.Event(), threading.Event()
        self.answering: str | int | None = None
        self._lines = Lines(descriptor)
        threading.Thread(target=self._receive, daemon=True).start()

    def next(self) -> dict:
        """Waits for a task."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()

    def next_within_job(self) -> dict | None:
        """Returns a request that waits, to be answered within the job; None if there is none, or the job is to end."""
        with self._changed:
            if not self._waiting or self.ends_job:
                return None
            task = self._waiting.popleft()
            self.answering = task["id"]
            return task

    @property
    def ends_job(self) -> bool:
        """Whether the job is to end or to be paused."""
        return self.job_stop.is_set() or self.job_pause.is_set()

    def _receive(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            with self._changed:
                match message["do"]:
                    case "stop":
                        self._stop({"do": "answer", "id": message["id"]}, self.stops.get(message["id"]))
                    case "stop job" | "pause job":
                        if message["do"] == "stop job":
                            self._stop({"do": "job"}, self.job_stop)
                        else:
                            self.job_pause.set()
                        if self.answering in self.stops:
                            self.stops[self.answering].set()
                    case "job":
                        self.job_stop, self.job_pause = threading.Event(), threading.Event()
                        self._add(message)
                    case _:
                        if "id" in message:
                            self.stops[message["id"]] = threading.Event()
                        self._add(message)
            self._lines.handled()
        os._exit(0)  # the supervisor has gone

    def _add(self, task: dict) -> None:
        self._waiting.append(task)
        self._changed.notify()

    def _stop(self, which: dict, event: threading.Event | None) -> None:
        """Drops a task that has not begun; else sets its event."""
        task = next((task for task in self._waiting if which.items() <= task.items()), None)
        if task is not None:
            self._waiting.remove(task)
            self.stops.pop(task["id"], None)
            self._outbox.send({"tells": "dropped", "do": task["do"], "id": task["id"]})
        elif event is not None:
            event.set()
