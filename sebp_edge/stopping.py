"""How one thread asks another to stop: a signal for each call, looked at wherever that call can safely end."""

import threading
from collections.abc import Callable


class StopAsked(KeyboardInterrupt):
    """The app asked this call to stop. Handled as Ctrl-C is."""


class StopSignal:
    """Asks one call to stop, once.

    Args:
        event: an app's own event, which asks for the same once it is set.
    """

    def __init__(self, event: threading.Event | None = None):
        self._events = [threading.Event()] + ([] if event is None else [event])
        self._heard = False

    def set(self) -> None:
        """Asks for the stop, from any thread."""
        self._events[0].set()

    def check(self) -> None:
        """To be called where the call can safely end.

        Raises:
            StopAsked: it was asked to. Not again afterwards, so that what was learnt can be saved.
        """
        if not self._heard and any(event.is_set() for event in self._events):
            self._heard = True
            raise StopAsked


class Checked:
    """A callable, with its attributes, that checks a signal before each call."""

    def __init__(self, function: Callable, signal: StopSignal):
        self._function, self._signal = function, signal

    def __call__(self, *arguments, **options):
        self._signal.check()
        return self._function(*arguments, **options)

    def __getattr__(self, name: str):
        return getattr(self._function, name)
