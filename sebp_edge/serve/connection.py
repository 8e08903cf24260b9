"""The app's end: the lines that it writes, and the answers and notifications that it reads."""

from sebp_edge.serve.streams import Lines, Outbox


class Connection:
    """The connection to an app, in JSON-RPC 2.0.

    Args:
        outbox: for what the app reads.

    Attributes:
        lines: what the app writes; see `Lines`.
        unanswered: the `id`s of requests that are answered later.
    """

    def __init__(self, descriptor: int, outbox: Outbox):
        self._outbox = outbox
        self.lines = Lines(descriptor, outbox)
        self.unanswered: set[str | int] = set()

    def send(self, message: dict) -> None:
        """Sends a message; never blocks."""
        self._outbox.send({"jsonrpc": "2.0", **message})

    def notify(self, method: str, params: dict) -> None:
        """Sends a notification."""
        self.send({"method": method, "params": params})

    def answer(self, id: str | int, answer: dict) -> None:
        """Answers a request that waited for it with a `result` or an `error`."""
        self.unanswered.discard(id)
        self.send({"id": id, **answer})

    @property
    def has_room(self) -> bool:
        """Whether the app keeps up with what it is sent."""
        return self._outbox.has_room

    def drain(self, seconds: float) -> None:
        """Waits until the app has read all, or the time is over."""
        self._outbox.drain(seconds)
