"""The worker as the supervisor sees it: one process with torch, started when it is needed."""

import os
import time
from collections.abc import Callable

from sebp_edge.basics.children import Children
from sebp_edge.serve.parent_process import command_of
from sebp_edge.serve.streams import PIPES, Lines, Outbox


class WorkerProcess:
    """A running worker. Must be made in a thread that lives as long as the supervisor: see `parents.end_with_parent`.

    Args:
        receive: called in another thread with this object and each line, then with None once it has ended.

    Attributes:
        requests: the `id`s of requests that it has not answered.
        used: when it was last given work or answered, as `time.monotonic` has it.
    """

    def __init__(self, children: Children, environment: dict[str, str], receive: Callable):
        self._children = children
        self._process = children.start([*command_of("works", "worker"), str(os.getpid())], env=environment, **PIPES)
        self.pid = self._process.pid
        self._lines = Lines(os.dup(self._process.stdout.fileno()), lambda line: receive(self, line))
        self._lines.start()
        self._outbox = Outbox(os.dup(self._process.stdin.fileno()), lambda: None)
        self._process.stdin.close()
        self._process.stdout.close()
        self.requests: set[str | int] = set()
        self.used = time.monotonic()

    def send(self, message: dict) -> None:
        """Sends it a message; never blocks, even if it is stopped."""
        self._outbox.send(message)
        self.used = time.monotonic()

    def handled(self) -> None:
        """Says that one of its lines was dealt with."""
        self._lines.handled()
        self.used = time.monotonic()

    def kill(self) -> int:
        """Ends it and its own children at once; returns how it ended. Its memory is free then."""
        self._outbox.close()
        return self._children.kill(self._process)
