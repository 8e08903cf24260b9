"""A clock for rates and estimates, which stands still while the process is stopped."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds between two looks at the time; a longer gap in which nothing was computed is not counted.
INTERVAL, MAX_GAP = 0.1, 0.5
# Share of a gap that a process computes at least if it runs, also beside others.
MIN_COMPUTED = 0.1


class WorkClock:
    """Counts the seconds in which the process can run: not those after SIGSTOP, or of a sleeping machine.

    As a context manager, it looks at the time in a thread of its own. So it sees a gap only if no thread ran, however
    long a step takes; and since a library may keep Python's lock for long, only if the process computed nothing either.
    """

    def __init__(self):
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._seen, self._computed, self._stopped = time.perf_counter(), time.process_time(), 0.0
        self._standing: float | None = None  # what it shows within `standing_still`

    def __call__(self) -> float:
        """Returns seconds; only differences mean something."""
        with self._lock:
            if self._standing is not None:
                return self._standing
            now, computed = time.perf_counter(), time.process_time()
            gap = now - self._seen
            if gap > MAX_GAP and computed - self._computed < MIN_COMPUTED * gap:
                self._stopped += gap
            self._seen, self._computed = now, computed
            return now - self._stopped

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Context in which it stands still, since the process waits."""
        standing = self()
        self._standing = standing
        try:
            yield
        finally:
            with self._lock:
                self._seen, self._computed, self._standing = time.perf_counter(), time.process_time(), None
                self._stopped = self._seen - standing

    def __enter__(self) -> "WorkClock":
        self()
        threading.Thread(target=self._watch, name="sebp-edge clock", daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._ends.set()

    def _watch(self) -> None:
        while not self._ends.wait(INTERVAL):
            self()
