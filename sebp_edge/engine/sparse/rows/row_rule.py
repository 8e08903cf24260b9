"""The protocol of rules for `sparsify(rows=...)` that drop rows of dL/dY which carry gradient."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from sebp_edge.ops import Selector


@dataclass(frozen=True)
class DroppedRows:
    """What a rule dropped in one layer, or in layers computed together, since the model was sparsified.

    Attributes:
        layers: the names of the layers.
        passes: the number of backward passes.
        rows: the number of rows of dL/dY over all passes.
        active: the number of non-zero rows.
        kept: the number of rows that were computed.
        lost_energy: the share of the squared norm in active rows that were not kept, averaged over the passes.
        epsilon: relative to the median norm, given or derived; None if there is none, or none yet.
    """

    layers: tuple[str, ...]
    passes: int
    rows: int
    active: int
    kept: int
    lost_energy: float
    epsilon: float | None


class Selection(Protocol):
    """A rule at work in one sparsified model."""

    def selector(self, layers: Sequence[nn.Module]) -> Selector:
        """Returns the selector of these layers' rows in the backward pass; the same object each time."""

    def dropped(self) -> list[DroppedRows]:
        """Returns what was dropped so far, by layer. Waits for the device."""


class RowRule(ABC):
    """A rule that approximates gradients: each layer computes the rows that a selector chooses from its dL/dY."""

    @abstractmethod
    def begin(self, model: nn.Module) -> Selection:
        """Returns the selection for one model, which is about to be sparsified."""
