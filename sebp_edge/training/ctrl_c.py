"""Ctrl-C that is not lost: Python raises KeyboardInterrupt wherever it happens to be, also within a callback of a
library that drops its errors. Then nothing would end."""

import signal
import threading
from collections.abc import Iterable, Iterator


class CtrlC:
    """A context in which a Ctrl-C is remembered, where one raises KeyboardInterrupt: in the main thread, while nobody
    has put another handler in the place of Python's own."""

    def __init__(self):
        self._was_pressed = self._listens = False

    def between(self, items: Iterable) -> Iterator:
        """The items, one after the other.

        Raises:
            KeyboardInterrupt: it was pressed before the next one, and went unheard.
        """
        for item in items:
            if self._was_pressed:
                raise KeyboardInterrupt
            yield item

    def __enter__(self) -> "CtrlC":
        in_main = threading.current_thread() is threading.main_thread()
        self._listens = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._listens:
            signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(self, *exception) -> None:
        if self._listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _remember(self, number: int, frame) -> None:
        self._was_pressed = True
        signal.default_int_handler(number, frame)
