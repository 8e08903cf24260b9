"""The app's end: the lines that it writes, and the answers and notifications that it reads."""

from collections.abc import Callable

from sebp_edge.serve.streams import Lines, Outbox


class Connection(Outbox):
    """The connection to an app, in JSON-RPC 2.0.

    Args:
        descriptors: the protocol's, to read and to write.
        on_gone: see `Outbox`.

    Attributes:
        lines: what the app writes.
        unanswered: the `id`s of requests that are answered later.
    """

    def __init__(self, descriptors: tuple[int, int], on_gone: Callable[[], None]):
        super().__init__(descriptors[1], on_gone)
        self.lines = Lines(descriptors[0], self)
        self.unanswered: set[str | int] = set()

    def send(self, message: dict) -> None:
        """Puts a message behind those that wait. Never blocks."""
        super().send({"jsonrpc": "2.0", **message})

    def notify(self, method: str, params: dict) -> None:
        """Sends a notification."""
        self.send({"method": method, "params": params})

    def answer(self, id: str | int, answer: dict) -> None:
        """Sends the `result` or the `error` of a request that waited for it."""
        self.unanswered.discard(id)
        self.send({"id": id, **answer})
