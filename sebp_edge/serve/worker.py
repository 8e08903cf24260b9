"""The worker's entry: `python -m sebp_edge.serve.worker PID` of the supervisor. Arms its ends, then imports torch."""

import json
import os
import queue
import sys
import threading

from sebp_edge.serve.ends import end_with_parent
from sebp_edge.serve.streams import Lines, Outbox, take_streams


class Tasks:
    """What the supervisor wants done, received in a thread: stops take effect while another task runs.

    Attributes:
        stops: for each task that waits or runs, the event that stops it.
        pausing: set once the running job is to be paused.
    """

    def __init__(self, descriptor: int):
        self._waiting: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.stops: dict[str | int, threading.Event] = {}
        self.pausing = threading.Event()
        self._lines = Lines(descriptor, self._receive)

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


def main() -> None:
    """Works for the supervisor until that ends it."""
    end_with_parent(int(sys.argv[-1]))
    descriptors = take_streams()
    tasks = Tasks(descriptors[0])
    outbox = Outbox(descriptors[1], lambda: os._exit(0))
    try:
        from sebp_edge.serve.work import Worker
    except (ImportError, OSError) as error:  # a damaged installation, or an app that was frozen without a library
        outbox.send({"tells": "broken", "why": f"{type(error).__name__}: {error}"})
        outbox.drain(1.0)
        raise
    Worker(tasks, outbox).run()


if __name__ == "__main__":
    main()
