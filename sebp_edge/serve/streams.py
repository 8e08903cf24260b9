"""The protocol's streams: lines of JSON, of bounded size, each way with a thread that may wait for the other end.

`take_streams` comes before every import but the standard library's. From then on, what a library prints goes to the
standard error, and a child process that reads its standard input reads nothing.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

# A line of a client may have so many bytes: texts can be given in it.
MAX_LINE = 2**23
# If so many bytes wait for the reader, what can be sent later is not sent now, and no further request is read.
MAX_WAITING = 2**20
# A thread that reads is ahead of its receiver by so many lines.
_LINES_AHEAD = 64
_CHUNK = 2**16


def take_streams() -> tuple[int, int]:
    """Moves the protocol to descriptors above 2, which no child inherits; returns the one to read and the one to write.

    Afterwards 0 is the null device, and 1 is the standard error.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    taken = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return taken


class LongLine:
    """Stands for a line that was longer than `MAX_LINE`, which is not kept."""


class Lines:
    """The lines of a stream, for a thread that may wait for each; `handled` must be called for each, by any thread.

    Args:
        replies: whose reader must keep up before the next line is read.
    """

    def __init__(self, descriptor: int, replies: "Outbox | None" = None):
        self._descriptor, self._replies = descriptor, replies
        self._ahead = threading.Semaphore(_LINES_AHEAD)

    def handled(self) -> None:
        """Says that the receiver is done with a line."""
        self._ahead.release()

    def __iter__(self) -> Iterator[bytes | type[LongLine]]:
        pending, is_too_long = bytearray(), False
        while True:
            if self._replies is not None:
                self._replies.wait_for_room()
            try:
                chunk = os.read(self._descriptor, _CHUNK)
            except OSError:
                chunk = b""
            if not chunk:
                with suppress(OSError):
                    os.close(self._descriptor)
                return
            *ended, rest = chunk.split(b"\n")
            for part in ended:
                if not is_too_long:
                    pending += part
                    is_too_long = len(pending) > MAX_LINE
                self._ahead.acquire()
                yield LongLine if is_too_long else bytes(pending)
                pending, is_too_long = bytearray(), False
            pending += rest
            if len(pending) > MAX_LINE:
                pending, is_too_long = bytearray(), True


class Outbox:
    """Writes messages in a thread, one line each.

    Args:
        on_gone: called in that thread once nobody reads any more.
    """

    def __init__(self, descriptor: int, on_gone: Callable[[], None]):
        self._descriptor, self._on_gone = descriptor, on_gone
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self._is_closing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: dict) -> None:
        """Puts a message behind those that wait. Never blocks."""
        # Only ASCII, since file names may not be valid text.
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        with self._changed:
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether the reader keeps up."""
        return self._waiting < MAX_WAITING

    def wait_for_room(self) -> None:
        """Blocks until the reader keeps up."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room)

    def drain(self, seconds: float) -> None:
        """Waits until all is written, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Makes the thread end, and the other end see the end of the stream, once all is written or cannot be."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        is_gone = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closing)
                if not self._lines:
                    break
                line = self._lines.popleft()
            if not is_gone:
                try:
                    self._write(line)
                except OSError:
                    is_gone = True
                    self._on_gone()
            with self._changed:
                self._waiting -= len(line)
                self._changed.notify_all()
        # By this thread, so that no other file gets the number while it is written to.
        with suppress(OSError):
            os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._descriptor, view) :]


class JsonRpcOutbox(Outbox):
    """Writes messages of JSON-RPC 2.0."""

    def send(self, message: dict) -> None:
        """See `Outbox.send`."""
        super().send({"jsonrpc": "2.0", **message})
