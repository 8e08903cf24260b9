"""A histogram of magnitudes on a logarithmic grid, and the knee of their distribution (Topchii et al., section 3.1).

Bins are a tenth of a decade wide, as the paper's threshold of 10^-4.4 = 3.98e-5 suggests, from 10^-12 to 10^2. Zeros
are not counted. Nothing here waits for the device, except `below` and `bins`.
Shapes: N magnitudes, J bins.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class LogHistogram:
    """Counts magnitudes, and sums their energy, by bin.

    Attributes:
        counts_J: the number of magnitudes in each bin, int64 [J]; the first and last bins include all beyond them.
    """

    LOWEST, BINS_PER_DECADE, NUM_BINS = -12, 10, 140
    WINDOW = 5

    def __init__(self, device: torch.device):
        self.counts_J = torch.zeros(self.NUM_BINS, dtype=torch.int64, device=device)
        self._energy_J = torch.zeros(self.NUM_BINS, device=device)

    def count(self, magnitude_N: Tensor, energy_N: Tensor) -> None:
        """Counts magnitudes [..., N] with positive energy."""
        decades_N = magnitude_N.log10() - self.LOWEST
        bins_N = (decades_N * self.BINS_PER_DECADE).nan_to_num().clamp(0, self.NUM_BINS - 1).long()
        # Sums along the last dimension first: fp32 loses small terms in one sum over millions of elements.
        sizes = (*bins_N.shape[:-1], self.NUM_BINS)
        counts_J = torch.zeros(sizes, dtype=torch.int64, device=bins_N.device)
        energy_J = torch.zeros(sizes, device=bins_N.device)
        counts_J.scatter_add_(-1, bins_N, (energy_N > 0).long())
        energy_J.scatter_add_(-1, bins_N, energy_N.float())
        self.counts_J += counts_J.view(-1, self.NUM_BINS).sum(0)
        self._energy_J += energy_J.view(-1, self.NUM_BINS).sum(0)

    def merge(self, other: "LogHistogram") -> None:
        """Adds what `other` has counted, on any device."""
        self.counts_J += other.counts_J.to(self.counts_J.device)
        self._energy_J += other._energy_J.to(self.counts_J.device)

    def epsilon(self, max_lost: float) -> Tensor:
        """Returns the knee of the smoothed cumulative distribution, or a lower bin edge; fp32 [].

        The distribution is smoothed by a centred sum of `WINDOW` edges. The knee is where the slope falls most, above a
        cluster of noise; the rise into the cluster may be as sharp, but a threshold there would drop none of it. The
        first of equal edges is taken; counts are integers, so that equal ones compare as equal.

        Args:
            max_lost: the largest share of the energy that may be dropped; if the knee would drop more, the last edge
                that does not is returned. 1 returns the knee itself.
        """
        below_J = F.pad(self.counts_J.cumsum(0), (1, 0))
        half = self.WINDOW // 2
        padded_J = torch.cat([below_J[:1].expand(half), below_J, below_J[-1:].expand(half)])
        knee = padded_J.unfold(0, self.WINDOW, 1).sum(1).diff(n=2).argmin() + 1
        lost_J = F.pad(self._energy_J.cumsum(0), (1, 0))
        last_allowed = (lost_J <= max_lost * lost_J[-1]).sum() - 1
        return 10.0 ** (self.LOWEST + torch.minimum(knee, last_allowed) / self.BINS_PER_DECADE)

    def below(self, epsilon: float) -> tuple[int, float]:
        """Returns the number of magnitudes below the edge `epsilon` of a bin, and their share of the energy."""
        edge = round((math.log10(epsilon) - self.LOWEST) * self.BINS_PER_DECADE)
        energy_J = self._energy_J.double()
        total = float(energy_J.sum())
        return int(self.counts_J[:edge].sum()), float(energy_J[:edge].sum()) / total if total else 0.0

    def bins(self) -> Iterator[tuple[float, int]]:
        """Yields the bins from the first to the last non-empty one: lower edge as a power of 10, and count."""
        counts = self.counts_J.tolist()
        filled = [index for index, count in enumerate(counts) if count]
        for index in range(filled[0], filled[-1] + 1):
            yield round(self.LOWEST + index / self.BINS_PER_DECADE, 1), counts[index]
