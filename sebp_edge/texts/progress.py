"""Reports how far the preparation of texts is, and lets it be stopped."""

import time

from sebp_edge.basics.stopping import Check
from sebp_edge.events import PreparationProgress, Sink, silent

# Between two events, unless a stage begins or ends.
SECONDS = 0.2


class Progress:
    """The progress of a preparation, in stages.

    Args:
        on_event: receives a few events a second, and one at the end of each stage.
        check: called wherever the preparation may end; may raise to end it.
    """

    def __init__(self, on_event: Sink = silent, check: Check = lambda: None):
        self._on_event, self._check = on_event, check
        self._stage, self._done, self._total, self._reported = "", 0, 0, 0.0

    def begin(self, stage: str, total: int) -> None:
        """Begins a stage of `total` units, which are characters, bytes or something else."""
        self._stage, self._done, self._total = stage, 0, total
        self._report()

    def advance(self, amount: int) -> None:
        """Says that `amount` more units are done."""
        self._done += amount
        if time.monotonic() - self._reported >= SECONDS:
            self._report()
        self._check()

    def end(self) -> None:
        """Ends the stage."""
        self._done = self._total
        self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        self._on_event(PreparationProgress(self._stage, min(self._done, self._total), self._total))
        self._check()


class _Silent(Progress):
    """Reports nothing and counts nothing, so one is enough for all."""

    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...

    def end(self) -> None: ...


SILENT = _Silent()
