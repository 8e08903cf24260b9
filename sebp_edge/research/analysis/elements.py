"""The SEBP paper's threshold: it counts as zero every element of dL/dY below the knee of the elements' histogram.

One threshold, epsilon, for all layers: the knee of the cumulative distribution of log10 |g| over the non-zero elements
in the blocks, in the gradient of each example's mean loss, as the paper's 3.98e-5 was found. The head does not count:
its gradients are probabilities of words, most of them tiny.
"""

from dataclasses import dataclass

import torch

from sebp_edge.research.analysis.gradients import RowGradients
from sebp_edge.research.rules.histogram import LogHistogram


@dataclass(frozen=True)
class Elements:
    """The elements of dL/dY in all layers of the blocks, and the paper's threshold on them.

    Attributes:
        epsilon: the threshold, in units of the gradient of an example's mean loss.
        histogram: of the absolute values: lower edge, as a power of 10, and number of elements of each bin.
        zero: share of elements that are exactly zero.
        below: share of elements that are zero or below epsilon.
        energy_below: share of the squared norm in these elements.
    """

    epsilon: float
    histogram: tuple[tuple[float, int], ...]
    zero: float
    below: float
    energy_below: float


def threshold_elements(gradients: list[RowGradients]) -> Elements:
    """Finds the threshold of the elements of all layers in the blocks."""
    in_blocks = [one for one in gradients if one.info.block is not None]
    merged, total = LogHistogram(torch.device("cpu")), sum(one.num_elements for one in in_blocks)
    for one in in_blocks:
        merged.merge(one.elements)
    # A max_lost of 1 gives the knee itself, however much energy is below it.
    epsilon = float(merged.epsilon(1))
    below, energy_below = share_below(merged, total, epsilon)
    zero = 1 - int(merged.counts_J.sum()) / total
    return Elements(epsilon, tuple(merged.bins()), zero, below, energy_below)


def share_below(histogram: LogHistogram, num_elements: int, epsilon: float) -> tuple[float, float]:
    """Returns the share of elements that are zero or below epsilon, and their share of the squared norm."""
    below, energy_below = histogram.below(epsilon)
    zeros = num_elements - int(histogram.counts_J.sum())
    return (zeros + below) / num_elements, energy_below
