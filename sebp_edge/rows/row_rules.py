"""Which rows to keep, from their squared norms: plain rules on tensors, which never wait for the device.

    largest          the n rows of largest norm
    water_filling    p_i = min(1, tau |g_i|), with tau such that they sum up to n      (Wang, Chen, Zhu 2024)
    above            |g_i| >= epsilon m, m the active rows' median; and more, where that would lose too much energy
    softly_above     p_i = 1 for those rows, |g_i| / (the norm below which rows are dropped) for the others
    holding          the fewest rows that hold a share of the energy
    draw             keeps row i with probability p_i, weighted by 1 / p_i: sums over rows keep their mean
    NormHistogram    an epsilon at the knee of the distribution of norms               (Topchii et al., section 4)

Energy is the squared norm: `energy_N`. A row is active if its energy is not zero, as fp32's is if no element is above
1e-23; one whose energy is NaN or infinite counts as larger than any other, so that no rule hides it.
Shapes: N rows, J bins.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def largest(energy_N: Tensor, n: int) -> Tensor:
    """The n active rows of most energy, the first of equal ones; bool [N]."""
    order_N = _norms(energy_N).argsort(descending=True, stable=True)
    keep_N = torch.zeros_like(energy_N, dtype=torch.bool)
    return keep_N.index_fill_(0, order_N[:n], True) & (energy_N != 0)


def water_filling(energy_N: Tensor, n: int) -> Tensor:
    """Probabilities in proportion to the norms, at most 1, that sum up to n; or 1 for all active rows."""
    norm_N, num_rows = _norms(energy_N), len(energy_N)
    sorted_N = norm_N.sort(descending=True).values
    rest_N = sorted_N.flip(0).cumsum(0).flip(0)
    left_N = min(n, num_rows) - torch.arange(num_rows, device=energy_N.device)
    # The k largest rows are certain, k the least for which the others' probabilities are at most 1; at most n - 1 are.
    certain = (sorted_N * left_N <= rest_N).int().argmax(dim=0, keepdim=True)
    tau = (left_N / rest_N).index_select(0, certain)
    return torch.where(norm_N > 0, (tau * norm_N).clamp(max=1), 0)


def above(energy_N: Tensor, epsilon: Tensor | float, max_lost: float) -> tuple[Tensor, Tensor]:
    """The rows that a threshold keeps, bool [N], and the norm under which it drops, [1].

    Args:
        energy_N: squared norms.
        epsilon: relative to the median norm of the active rows.
        max_lost: largest share of the energy that may be dropped; where the threshold would drop more, it is lower.
    """
    norm_N = _norms(energy_N)
    sorted_N, order_N = norm_N.sort(stable=True)
    lost_N = _finite(energy_N)[order_N].cumsum(0)
    drop_N = torch.zeros_like(energy_N, dtype=torch.bool)
    drop_N[order_N] = lost_N <= max_lost * lost_N[-1]
    bound = epsilon * _median_norm(sorted_N)
    keep_N = (norm_N > 0) & ~(drop_N & (norm_N < bound)) | ~energy_N.isfinite()
    return keep_N, torch.minimum(bound, torch.where(keep_N, norm_N, torch.inf).amin())


def softly_above(energy_N: Tensor, epsilon: Tensor | float, max_lost: float) -> Tensor:
    """Probabilities: 1 where `above` keeps, and below in proportion to the norm."""
    keep_N, bound = above(energy_N, epsilon, max_lost)
    norm_N = _norms(energy_N)
    return torch.where(keep_N, 1, torch.where(norm_N > 0, norm_N / bound, 0).clamp(max=1))


def holding(energy_N: Tensor, share: float) -> Tensor:
    """How few rows hold this share of the energy, int64 []; 0 if there is none."""
    held_N = _finite(energy_N).sort(descending=True).values.cumsum(0)
    return ((held_N < share * held_N[-1]).sum() + 1).where(held_N[-1] > 0, 0)


_TICKS = 2**32


def draw(probability_N: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keeps rows with their probability: which, bool [N], and their weights 1 / p, 0 elsewhere.

    Systematic sampling (Madow 1949): the rows are laid end to end, each as long as its probability, and steps of length
    1 from a random start hit those that are kept. So their number is the sum of the probabilities, rounded up or down.
    In integers, so that each probability is exact and the weight is its own.
    """
    ticks_N = (probability_N * _TICKS).to(torch.int64).clamp(min=1)
    ticks_N = torch.where(probability_N > 0, ticks_N, 0)
    start = torch.randint(_TICKS, (1,), generator=generator, device=probability_N.device)
    ends_N = start + ticks_N.cumsum(0)
    keep_N = ends_N // _TICKS > (ends_N - ticks_N) // _TICKS
    return keep_N, torch.where(keep_N, _TICKS / ticks_N.to(probability_N.dtype), 0)


class NormHistogram:
    """Row norms of several backward passes, relative to each one's median, and the epsilon that they suggest.

    Rows are what is dropped, so norms of rows are counted, not elements: a row with small elements in it is not noise.
    Relative to the median, they depend neither on the loss scale nor on the number of tokens in a mean. Bins are a
    tenth of a decade wide, as 10^-4.4 = 3.98e-5 of the paper suggests, from 10^-12 to 10^2.

    Attributes:
        counts_J: the active rows in each bin, int64 [J]; what is beyond the first or last one is counted in it.
    """

    LOWEST, BINS_PER_DECADE, NUM_BINS = -12, 10, 140
    WINDOW = 5

    def __init__(self, device: torch.device):
        self.counts_J = torch.zeros(self.NUM_BINS, dtype=torch.int64, device=device)
        self._energy_J = torch.zeros(self.NUM_BINS, device=device)

    def add(self, energy_N: Tensor) -> None:
        """Counts the active rows of one backward pass; each pass's energy weighs the same."""
        norm_N, finite_N = _norms(energy_N), _finite(energy_N)
        decades_N = (norm_N / _median_norm(norm_N.sort().values)).log10() - self.LOWEST
        bins_N = (decades_N * self.BINS_PER_DECADE).nan_to_num().clamp(0, self.NUM_BINS - 1).long()
        self.counts_J.scatter_add_(0, bins_N, (finite_N > 0).long())
        self._energy_J.scatter_add_(0, bins_N, (finite_N / _positive(finite_N.sum())).float())

    def epsilon(self, max_lost: float) -> Tensor:
        """The knee of the smoothed cumulative distribution, or the last edge below it that loses no more; fp32 [].

        With 1 for `max_lost` it is the knee itself.

        Smoothed by a centred sum of `WINDOW` edges. The knee is where the slope falls most, above a cluster of noise;
        the rise into the cluster may be as sharp, but a threshold there drops nothing of it. Of equal edges the first;
        counts are integers, so that equal ones stay equal.
        """
        below_J = F.pad(self.counts_J.cumsum(0), (1, 0))
        half = self.WINDOW // 2
        padded_J = torch.cat([below_J[:1].expand(half), below_J, below_J[-1:].expand(half)])
        knee = padded_J.unfold(0, self.WINDOW, 1).sum(1).diff(n=2).argmin() + 1
        lost_J = F.pad(self._energy_J.cumsum(0), (1, 0))
        last_allowed = (lost_J <= max_lost * lost_J[-1]).sum() - 1
        return 10.0 ** (self.LOWEST + torch.minimum(knee, last_allowed) / self.BINS_PER_DECADE)


def lost_share(energy_N: Tensor, keep_N: Tensor) -> Tensor:
    """The share of the energy that is in rows that are not kept, []; 0 where there is none."""
    finite_N = _finite(energy_N)
    return torch.where(keep_N, 0, finite_N).sum() / _positive(finite_N.sum())


def _norms(energy_N: Tensor) -> Tensor:
    """Norms; of rows that are not finite a number above all others, small enough that N of them can be summed up."""
    largest = torch.finfo(energy_N.dtype).max / (2 * max(len(energy_N), 1))
    return torch.where(energy_N.isfinite(), energy_N.sqrt(), largest)


def _finite(energy_N: Tensor) -> Tensor:
    return torch.where(energy_N.isfinite(), energy_N, 0)


def _positive(total: Tensor) -> Tensor:
    """A sum to divide by: where it is zero, all that is divided is zero too."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def _median_norm(sorted_N: Tensor) -> Tensor:
    """The lower median of the active rows' norms, which come last in increasing order, [1]; 0 if there are none."""
    num_active = (sorted_N > 0).sum(0, keepdim=True)
    return sorted_N.index_select(0, len(sorted_N) - num_active + (num_active - 1) // 2)
