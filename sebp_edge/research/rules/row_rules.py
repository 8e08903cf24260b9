"""Rules that select rows by their squared norms: functions of tensors that never wait for the device.

    largest            the n rows of largest norm
    above_threshold    |g_i| >= epsilon m, m the median of active rows; more rows if these lose too much energy
    num_top_rows       the smallest number of rows with a given share of the energy
    NormHistogram      an epsilon at the knee of the distribution of norms (Topchii et al., section 3.1)

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


def above_threshold(energy_N: Tensor, epsilon: Tensor | float, max_lost: float) -> Tensor:
    """Selects the rows above a threshold, bool [N].

    Args:
        energy_N: squared norms.
        epsilon: the threshold, relative to the median norm of the active rows.
        max_lost: the largest share of the energy that may be dropped; lowers the threshold if needed.
    """
    norm_N = _norms(energy_N)
    sorted_N, order_N = norm_N.sort(stable=True)
    lost_N = _finite(energy_N)[order_N].cumsum(0)
    drop_N = torch.zeros_like(energy_N, dtype=torch.bool)
    drop_N[order_N] = lost_N <= max_lost * lost_N[-1]
    bound = epsilon * _median_norm(sorted_N)
    return (norm_N > 0) & ~(drop_N & (norm_N < bound)) | ~energy_N.isfinite()


def num_top_rows(energy_N: Tensor, share: float) -> Tensor:
    """Returns the smallest number of rows with this share of the energy, int64 []; 0 if there is no energy."""
    sums_N = _finite(energy_N).sort(descending=True).values.cumsum(0)
    return ((sums_N < share * sums_N[-1]).sum() + 1).where(sums_N[-1] > 0, 0)


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
