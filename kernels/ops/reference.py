"""Plain PyTorch of every op: the ground truth, and the path wherever no kernel of ours runs.

Shapes: N rows (batch times time), A active rows, K inputs, M outputs; C loss rows, V vocabulary.
"""

import torch
from torch import Tensor


def nonzero_rows(*douts_NM: Tensor) -> Tensor:
    """Ids of the rows with any non-zero element in any of the matrices, int64 [A], increasing. NaN is not zero."""
    return torch.stack([dout_NM.ne(0).any(dim=1) for dout_NM in douts_NM]).any(dim=0).nonzero().squeeze(1)


def sparse_linear_dx(dout_AM: Tensor, weight_MK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """dX = dY W on the active rows, exact zeros elsewhere; [N, K] in dout's dtype (paper, equation 1)."""
    dx_NK = dout_AM.new_zeros(num_rows, weight_MK.shape[1])
    return dx_NK.index_copy_(0, rows_A, dout_AM @ weight_MK)


def sparse_linear_dweight(dout_AM: Tensor, x_AK: Tensor) -> Tensor:
    """dW = dY[A]ᵀ X[A]; [M, K] (paper, equation 2)."""
    return dout_AM.T @ x_AK


def sparse_linear_dbias(dout_AM: Tensor) -> Tensor:
    """db = the sum of dY over the active rows; [M]."""
    return dout_AM.sum(dim=0)


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    return torch.index_select(x_NK, 0, rows_A)


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of raw logits, fp32 [C], and if wanted their gradient with respect to those logits.

    The gradient is in the logits' dtype and may overwrite them; softmax runs in fp32.
    """
    values = logits_CV.float().mul_(scale) if scale != 1.0 else logits_CV.float()
    slope = None
    if softcap is not None:
        capped = torch.tanh(values / softcap)
        slope, values = 1 - capped.square(), capped * softcap
    logsumexp_C = torch.logsumexp(values, dim=1)
    losses_C = logsumexp_C - values.gather(1, targets_C[:, None]).squeeze(1)
    if not wanted:
        return losses_C, None
    dlogits_CV = values.sub_(logsumexp_C[:, None]).exp_()
    dlogits_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
    if slope is not None:
        dlogits_CV.mul_(slope)
    return losses_C, dlogits_CV.mul_(scale).to(logits_CV.dtype)
