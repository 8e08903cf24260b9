"""Reports how far the preparation of texts is, and lets it be stopped."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sebp_edge.basics.stopping import Check, in_thread
from sebp_edge.events import PreparationProgress, Sink, silent

# Between two events, unless a stage begins or ends.
SECONDS = 0.2

Item, Result = TypeVar("Item"), TypeVar("Result")


class Progress:
    """The progress of a preparation, in stages; work before the first one is not reported.

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

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields items that another thread makes; reports and checks meanwhile, however long one of them takes."""
        iterator = iter(items)

        def make_some() -> list[Item]:
            until, some = time.monotonic() + SECONDS, []
            for item in iterator:
                some.append(item)
                if time.monotonic() >= until:
                    break
            return some

        while some := in_thread(make_some, lambda: self.advance(0), SECONDS):
            yield from some

    def run(self, compute: Callable[[], Result]) -> Result:
        """Returns what a function returns that tells nothing itself; it runs in another thread, as in `watch`."""
        return next(self.watch(compute() for _ in range(1)))

    def end(self) -> None:
        """Ends the stage."""
        self._done = self._total
        self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self._stage:
            self._on_event(PreparationProgress(self._stage, min(self._done, self._total), self._total))
        self._check()


class _Silent(Progress):
    """Reports nothing and counts nothing, so one is enough for all."""

    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        return iter(items)

    def end(self) -> None: ...


SILENT = _Silent()
