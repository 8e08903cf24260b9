"""Assesses a trained adaptation beyond the gate: what it writes, what it cost, and what it repeats word for word."""

from dataclasses import dataclass

from sebp_edge.insight.copying import Copy
from sebp_edge.insight.general_loss import GeneralLoss
from sebp_edge.insight.samples import Sample


@dataclass(frozen=True)
class Assessment:
    samples: tuple[Sample, ...]
    expectation: str
    general_loss: GeneralLoss
    copies: tuple[Copy, ...]
