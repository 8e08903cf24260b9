"""Lets one thread stop a call in another: each call has a signal, and checks it wherever it can safely end."""

import threading
from collections.abc import Callable

# Called wherever a call can safely end; raises to end it.
Check = Callable[[], None]


class StopRequested(KeyboardInterrupt):
    """The app requested a stop of this call. It is handled like Ctrl-C."""


class StopSignal:
    """Stops one call, once.

    Args:
        event: an event of the app, which also requests the stop when it is set.
    """

    def __init__(self, event: threading.Event | None = None):
        self._events = [threading.Event()] + ([] if event is None else [event])
        self._has_raised = False

    def set(self) -> None:
        """Requests the stop; may be called from any thread."""
        self._events[0].set()

    def check(self) -> None:
        """Raises if a stop was requested. Called wherever the call can safely end.

        Raises:
            StopRequested: a stop was requested. Raised only once, so that the best state can be saved afterwards.
        """
        if not self._has_raised and any(event.is_set() for event in self._events):
            self._has_raised = True
            raise StopRequested
