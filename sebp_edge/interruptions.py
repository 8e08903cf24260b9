"""Handles Ctrl-C, SIGTERM and SIGHUP during work that must end in order."""

import math
import signal
import threading
import time
from collections.abc import Callable

from sebp_edge.errors import Interrupted

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
# An interruption without effect for this long was lost, for example in a destructor, where Python ignores errors.
_PATIENCE_SECONDS = 5


class Interruptions:
    """A context manager in which the first signal interrupts; later ones, and all after `hold`, wait until its end.

    At the end, the process's own handler gets the first signal that waited, and mostly raises a KeyboardInterrupt. If
    the context ends with an error, signals that waited are dropped. Only the main thread receives signals, and only
    signals with a handler in Python wait: a signal that ends the process at once still does.

    Attributes:
        outcome: what was completed despite the interruption. If it is set, an Interrupted with this text replaces the
            KeyboardInterrupt.
    """

    def __init__(self):
        self.outcome: str | None = None
        self._handlers: dict[int, Callable] = {}
        self._waiting: list[int] = []
        self._holds = False
        self._interrupted = -math.inf

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in NUMBERS}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._hear)
        return self

    def hold(self) -> None:
        """Makes all signals from now on wait."""
        self._holds = True

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if isinstance(error, KeyboardInterrupt):
                raise error
            if error is None and self._waiting:
                number = self._waiting[0]
                self._handlers[number](number, None)
        except KeyboardInterrupt as interrupt:
            if self.outcome is None:
                raise
            raise Interrupted(f"Interrupted. {self.outcome}") from interrupt

    def _hear(self, number: int, frame) -> None:
        if self._holds or time.monotonic() < self._interrupted + _PATIENCE_SECONDS:
            self._waiting.append(number)
            return
        self._interrupted = time.monotonic()
        self._handlers[number](number, frame)
        # The handler returned, so it did not interrupt.
        self._interrupted = -math.inf
