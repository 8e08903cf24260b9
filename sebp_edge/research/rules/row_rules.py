"""Rules that select rows by their squared norms: functions of tensors that never wait for the device.

    largest                    the n rows of largest norm
    water_filling              p_i = min(1, tau |g_i|), with tau such that they sum to n    (Wang, Chen, Zhu 2024)
    above_threshold            |g_i| >= epsilon m, m the median of active rows; more rows if these lose too much energy
    threshold_probabilities    p_i = 1 for those rows, |g_i| / (the norm below which rows are dropped) for the others
    num_top_rows               the smallest number of rows with a given share of the energy
    draw                       keeps row i with probability p_i and weight 1 / p_i, so that sums over rows are unbiased
    NormHistogram              an epsilon at the knee of the distribution of norms         (Topchii et al., section 3.1)

`energy_N` is the squared norm. A row is active if its energy is not zero; in fp32 it underflows to zero if no element
is above 1e-23. A row of NaN or infinite energy counts as larger than any other, so that no rule hides it.
Shapes: N rows.
"""

import torch
from torch import Tensor

from sebp_edge.research.rules.histogram import LogHistogram


def largest(energy_N: Tensor, n: int | Tensor) -> Tensor:
    """Selects the n active rows of largest energy, the first of equal ones; bool [N]. `n` may be on the device, []."""
    order_N = _norms(energy_N).argsort(descending=True, stable=True)
    is_kept_N = torch.arange(len(order_N), device=energy_N.device) < n
    return torch.zeros_like(is_kept_N).scatter_(0, order_N, is_kept_N) & (energy_N != 0)


def water_filling(energy_N: Tensor, n: int) -> Tensor:
    """Returns probabilities [N] proportional to the norms, at most 1, that sum to n; 1 for n or fewer active rows."""
    norm_N, num_rows = _norms(energy_N), len(energy_N)
    sorted_N = norm_N.sort(descending=True).values
    rest_N = sorted_N.flip(0).cumsum(0).flip(0)
    left_N = min(n, num_rows) - torch.arange(num_rows, device=energy_N.device)
    # The k largest rows have probability 1. k is the smallest number that leaves the others at most 1; k < n.
    certain = (sorted_N * left_N <= rest_N).int().argmax(dim=0, keepdim=True)
    tau = (left_N / rest_N).index_select(0, certain)
    return torch.where(norm_N > 0, (tau * norm_N).clamp(max=1), 0)


def above_threshold(energy_N: Tensor, epsilon: Tensor | float, max_lost: float) -> tuple[Tensor, Tensor]:
    """Selects the rows above a threshold.

    Args:
        energy_N: squared norms.
        epsilon: the threshold, relative to the median norm of the active rows.
        max_lost: the largest share of the energy that may be dropped; lowers the threshold if needed.

    Returns:
        The rows to keep, bool [N], and the norm below which rows are dropped, [1].
    """
    norm_N = _norms(energy_N)
    sorted_N, order_N = norm_N.sort(stable=True)
    lost_N = _finite(energy_N)[order_N].cumsum(0)
    drop_N = torch.zeros_like(energy_N, dtype=torch.bool)
    drop_N[order_N] = lost_N <= max_lost * lost_N[-1]
    bound = epsilon * _median_norm(sorted_N)
    keep_N = (norm_N > 0) & ~(drop_N & (norm_N < bound)) | ~energy_N.isfinite()
    return keep_N, torch.minimum(bound, torch.where(keep_N, norm_N, torch.inf).amin())


def threshold_probabilities(energy_N: Tensor, epsilon: Tensor | float, max_lost: float) -> Tensor:
    """Returns probabilities [N]: 1 for rows that `above_threshold` keeps, proportional to the norm for the others."""
    keep_N, bound = above_threshold(energy_N, epsilon, max_lost)
    norm_N = _norms(energy_N)
    return torch.where(keep_N, 1, torch.where(norm_N > 0, norm_N / bound, 0).clamp(max=1))


def num_top_rows(energy_N: Tensor, share: float) -> Tensor:
    """Returns the smallest number of rows with this share of the energy, int64 []; 0 if there is no energy."""
    sums_N = _finite(energy_N).sort(descending=True).values.cumsum(0)
    return ((sums_N < share * sums_N[-1]).sum() + 1).where(sums_N[-1] > 0, 0)


_TICKS = 2**32


def draw(probability_N: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws rows with the given probabilities, by systematic sampling (Madow 1949).

    Rows are laid end to end, each as long as its probability, and points at distance 1 from a random start select
    the rows to keep. So their number is the sum of the probabilities, rounded up or down. Computed in integers, so
    that each weight is the exact inverse of the probability.

    Returns:
        The rows to keep, bool [N], and their weights 1 / p, [N]; 0 elsewhere.
    """
    ticks_N = (probability_N * _TICKS).to(torch.int64).clamp(min=1)
    ticks_N = torch.where(probability_N > 0, ticks_N, 0)
    start = torch.randint(_TICKS, (1,), generator=generator, device=probability_N.device)
    ends_N = start + ticks_N.cumsum(0)
    keep_N = ends_N // _TICKS > (ends_N - ticks_N) // _TICKS
    return keep_N, torch.where(keep_N, _TICKS / ticks_N.to(probability_N.dtype), 0)


class NormHistogram(LogHistogram):
    """A histogram of row norms over several backward passes, relative to each pass's median, that yields an epsilon.

    It counts norms of rows, not elements, since rows are what is dropped: a row with some small elements is not noise.
    Norms relative to the median depend neither on the loss scale nor on the number of tokens in a mean.
    """

    def add(self, energy_N: Tensor) -> None:
        """Counts the active rows of one backward pass; the energy of each pass has the same weight."""
        norm_N, finite_N = _norms(energy_N), _finite(energy_N)
        self.count(norm_N / _median_norm(norm_N.sort().values), finite_N / _positive(finite_N.sum()))


def lost_share(energy_N: Tensor, keep_N: Tensor) -> Tensor:
    """Returns the share of the energy in rows that are not kept, []; 0 if there is no energy."""
    finite_N = _finite(energy_N)
    return torch.where(keep_N, 0, finite_N).sum() / _positive(finite_N.sum())


def _norms(energy_N: Tensor) -> Tensor:
    """Returns norms; those of non-finite rows are above all others, and small enough for a sum of N to be finite."""
    largest = torch.finfo(energy_N.dtype).max / (2 * max(len(energy_N), 1))
    return torch.where(energy_N.isfinite(), energy_N.sqrt(), largest)


def _finite(energy_N: Tensor) -> Tensor:
    return torch.where(energy_N.isfinite(), energy_N, 0)


def _positive(total: Tensor) -> Tensor:
    """Makes a sum safe to divide by; if it is zero, so is every dividend."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def _median_norm(sorted_N: Tensor) -> Tensor:
    """Returns the lower median of the active rows' norms, [1]; 0 if there are none. `sorted_N` is increasing."""
    num_active = (sorted_N > 0).sum(0, keepdim=True)
    return sorted_N.index_select(0, len(sorted_N) - num_active + (num_active - 1) // 2)
