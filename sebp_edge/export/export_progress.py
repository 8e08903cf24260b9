"""Tells how far an export is, and lets it be stopped."""

from dataclasses import dataclass

from sebp_edge.basics.stopping import Check
from sebp_edge.events import Sink, TensorWritten, silent


@dataclass(frozen=True)
class ExportProgress:
    """What is told during an export.

    Attributes:
        on_event, check: may raise to stop.
    """

    on_event: Sink = silent
    check: Check = lambda: None

    def written(self, number: int, total: int) -> None:
        """Says that so many of all tensors or files are written."""
        self.on_event(TensorWritten(number, total))
