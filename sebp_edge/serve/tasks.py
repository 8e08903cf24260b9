"""What the supervisor wants done, as the worker has it."""

import json
import os
import queue
import threading

from sebp_edge.serve.streams import Lines


class Tasks:
    """Tasks, received in a thread, so that stops take effect while another task runs.

    Attributes:
        stops: for each task that waits or runs, the event that stops it.
        pausing: set once the running job is to be paused.
    """

    def __init__(self, descriptor: int):
        self._waiting: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.stops: dict[str | int, threading.Event] = {}
        self.pausing = threading.Event()
        self._lines = Lines(descriptor, self._receive)
        self._lines.start()

    def next(self) -> dict:
        """Waits for a task."""
        return self._waiting.get()

    def waiting(self) -> dict | None:
        """Returns a task that waits, or None."""
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _receive(self, line: bytes | None) -> None:
        if line is None:  # the supervisor has gone
            os._exit(0)
        message = json.loads(line)
        match message["do"]:
            case "stop":
                if message["id"] in self.stops:
                    self.stops[message["id"]].set()
            case "pause":
                self.pausing.set()
            case _:
                if "id" in message:
                    self.stops[message["id"]] = threading.Event()
                self._waiting.put(message)
        self._lines.handled()
