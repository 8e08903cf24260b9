"""Ctrl-C stops an adaptation even when what runs at that moment loses it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from sebp_edge.events import Event, Sink, StepDone


@contextmanager
def heeding_ctrl_c(sink: Sink) -> Iterator[Sink]:
    """Gives a sink that raises KeyboardInterrupt at a step that was made in spite of Ctrl-C, and else calls `sink`.

    Python raises it wherever the main thread is, and C code that calls Python may clear whatever that raises: seen once
    in a training on a CPU, which went on.
    """
    pressed = False

    def note(number, frame) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def heed(event: Event) -> None:
        sink(event)
        if pressed and isinstance(event, StepDone):
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield sink  # ignored, as in the background of a shell, or an app's own
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, before)
