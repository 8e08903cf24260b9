"""What our kernels do, in plain PyTorch: their ground truth, and the path wherever they do not run.

Shapes: N rows (batch times time), A active rows, K columns; C loss rows, V vocabulary.
"""

import torch
from torch import Tensor


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    """Which rows have any non-zero element; bool [N]. NaN is not zero."""
    return dout_NM.ne(0).any(dim=1)


def row_norms(dout_NM: Tensor) -> Tensor:
    """The squared norm of each row, fp32 [N]; fp64 for fp64, whose small numbers fp32 would make zero."""
    return dout_NM.to(torch.promote_types(dout_NM.dtype, torch.float32)).square().sum(dim=1)


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    return torch.index_select(x_NK, 0, rows_A)


def scatter_rows(x_AK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """A matrix of `num_rows` rows with x's at the ids `rows_A`, and zeros elsewhere; [N, K]."""
    return x_AK.new_zeros(num_rows, x_AK.shape[1]).index_copy_(0, rows_A, x_AK)


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
    log_softmax_CV = torch.log_softmax(values, dim=1)
    losses_C = -log_softmax_CV.gather(1, targets_C[:, None]).squeeze(1)
    if not wanted:
        return losses_C, None
    dlogits_CV = log_softmax_CV.exp_()
    dlogits_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
    if slope is not None:
        dlogits_CV.mul_(slope)
    return losses_C, dlogits_CV.mul_(scale).to(logits_CV.dtype)
