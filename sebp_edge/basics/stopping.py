"""Lets one thread stop a call in another: each call has a signal, and checks it wherever it can safely end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")

# Called wherever a call can safely end; raises to end it.
Check = Callable[[], None]


class StopRequested(KeyboardInterrupt):
    """The app requested a stop of this call. It is handled like Ctrl-C."""


class PauseRequested(StopRequested):
    """The app requested a pause of this call, which a checkpoint lets go on later."""


class StopSignal:
    """Stops or pauses one call, once.

    Args:
        event: an event of the app, which also requests the stop when it is set.

    Attributes:
        can_pause: whether the call can be paused.
        is_pausing: whether a pause was requested, and not withdrawn.
    """

    def __init__(self, event: threading.Event | None = None):
        self._events = [threading.Event()] + ([] if event is None else [event])
        self._has_raised = False
        self.can_pause = self.is_pausing = False

    def pause(self) -> bool:
        """Requests a pause; may be called from any thread. Returns False if this call cannot be paused."""
        self.is_pausing = self.can_pause
        return self.can_pause

    def renew(self) -> None:
        """Lets a call that has ended by a pause begin again: it can be stopped and paused once more."""
        self._has_raised, self.is_pausing, self.can_pause = False, False, True

    @property
    def is_requested(self) -> bool:
        """Whether a stop or a pause was requested."""
        return self.is_pausing or any(event.is_set() for event in self._events)

    def set(self) -> None:
        """Requests the stop; may be called from any thread."""
        self._events[0].set()

    def check(self, *, may_pause: bool = True) -> None:
        """Raises if a stop or a pause was requested. Called wherever the call can safely end.

        Args:
            may_pause: whether it can be paused here.

        Raises:
            StopRequested, PauseRequested: raised only once, so that the best state can be saved afterwards.
        """
        if self._has_raised:
            return
        if any(event.is_set() for event in self._events):
            self._has_raised = True
            raise StopRequested
        if self.is_pausing and may_pause:
            self._has_raised = True
            raise PauseRequested


def in_thread(compute: Callable[[], Result], check: Check, seconds: float) -> Result:
    """Returns what a function returns, which runs in a thread; checks so often meanwhile, however long it takes.

    If a check raises, nobody waits for the thread, so that it does not keep the process.
    """
    made: Future[Result] = Future()

    def run() -> None:
        try:
            made.set_result(compute())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    while not wait([made], seconds).done:
        check()
    return made.result()
