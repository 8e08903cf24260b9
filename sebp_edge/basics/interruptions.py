"""Handles Ctrl-C, SIGTERM and SIGHUP during work that must end cleanly."""

import math
import signal
import threading
import time
from collections.abc import Callable

from sebp_edge.errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
# An interruption without effect for this long was lost, for example in a destructor, where Python ignores errors.
_LOST_AFTER_SECONDS = 5


class Interruptions:
    """A context manager in which the first signal interrupts; later ones, and all after `defer`, are deferred.

    At its end, the process's own handler receives the first signal that is still deferred, and usually raises a
    KeyboardInterrupt. If the context ends with an error, deferred signals are dropped. Only the main thread receives
    signals, and only those with a handler in Python are deferred: a signal that ends the process at once still does.
    """

    def __init__(self):
        self._outcome: Interrupted | None = None
        self._handlers: dict[int, Callable] = {}
        self._deferred: list[int] = []
        self._is_deferring = False
        self._interrupted_at = -math.inf

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: handler for s in SIGNALS if callable(handler := signal.getsignal(s))}
            for signum in self._handlers:
                signal.signal(signum, self._handle)
        return self

    def defer(self) -> None:
        """Defers all signals from now on."""
        self._is_deferring = True

    def begin_again(self) -> None:
        """Passes signals on at once again, those that are deferred too."""
        self._is_deferring = False
        self.deliver()

    def deliver(self) -> None:
        """Passes deferred signals to the process's own handlers, which may raise; called where that is safe."""
        while self._deferred:
            signum = self._deferred.pop(0)
            self._handlers[signum](signum, None)

    def complete(self, outcome: Interrupted) -> None:
        """Replaces a later KeyboardInterrupt by this error, which says what was completed nevertheless."""
        self._outcome = outcome

    def drop(self) -> None:
        """Drops deferred signals; called where what they would interrupt is over."""
        self._deferred.clear()

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        try:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            if isinstance(error, KeyboardInterrupt):
                raise error
            if error is None and self._deferred:
                signum = self._deferred[0]
                self._handlers[signum](signum, None)
        except KeyboardInterrupt as interrupt:
            if self._outcome is None:
                raise
            raise self._outcome from interrupt

    def _handle(self, signum: int, frame) -> None:
        if self._is_deferring or time.monotonic() < self._interrupted_at + _LOST_AFTER_SECONDS:
            self._deferred.append(signum)
            return
        self._interrupted_at = time.monotonic()
        self._handlers[signum](signum, frame)
        # The handler returned, so it did not interrupt.
        self._interrupted_at = -math.inf
