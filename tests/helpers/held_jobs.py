"""Jobs of warm servers that wait after an event until a test has acted, however late it does on a busy machine."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sebp_edge.serve.worker_tasks import Worker


@contextmanager
def holding(server: int, job: str, event: str, number: int = 1) -> Iterator[None]:
    """Within this context, a job waits after an event, the first one of its kind or a later one, unless it is to end.

    Args:
        server: the number of the server's process.
    """
    file = _file(server, job)
    file.write_text(f"{event} {number}")
    try:
        yield
    finally:
        file.unlink()


def hold_where_told() -> None:
    """Has workers that are forked from this process hold their jobs; they answer requests meanwhile."""
    on_event, seen = Worker._on_event, Counter()

    def tell_and_wait(self, id, event):
        on_event(self, id, event)
        kind = event.to_dict()["event"]
        seen[id, kind] += 1
        file, place = _file(os.getppid(), id), f"{kind} {seen[id, kind]}"
        with suppress(FileNotFoundError):
            while not self._tasks.ends_job and file.read_text() == place:
                self._while_waiting()
                time.sleep(0.01)
        self._while_waiting()

    Worker._on_event = tell_and_wait


def _file(server: int, job: str) -> Path:
    return Path(tempfile.gettempdir(), f"sebp-edge-tests-{server}-{job}")
