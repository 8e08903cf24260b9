"""The only place that chooses an implementation: our Triton kernels on NVIDIA GPUs, plain PyTorch everywhere else.

Matrix products are cuBLAS's in both. Where Triton is missing, the reference path runs, and a log line says so once.
"""

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from sebp_edge.ops import reference

logger = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether our kernels can run on this machine's GPUs."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        logger.info("No Triton for this GPU: the row-sparse operations run in plain PyTorch.")
        return False
    return True


def _runs_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    if _runs_kernels(x_NK):
        from sebp_edge.ops import row_kernels

        return row_kernels.gather_rows(x_NK, rows_A)
    return reference.gather_rows(x_NK, rows_A)


def scatter_rows(x_AK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """A matrix of `num_rows` rows with x's at the ids `rows_A`, increasing, and zeros elsewhere; [N, K]."""
    if _runs_kernels(x_AK):
        from sebp_edge.ops import row_kernels

        return row_kernels.scatter_rows(x_AK, rows_A, num_rows)
    return reference.scatter_rows(x_AK, rows_A, num_rows)


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    """Which rows have any non-zero element; bool [N]. NaN is not zero."""
    return reference.nonzero_rows(dout_NM)


def row_norms(dout_NM: Tensor) -> Tensor:
    """The squared norm of each row, fp32 [N]."""
    return reference.row_norms(dout_NM)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A B in `dtype`; on a GPU it is not rounded to the factors' dtype on the way."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a @ b).to(dtype)


def lora_up(
    down_NR: Tensor, weight_MR: Tensor, bias_M: Tensor | None, columns: tuple[int, ...], scaling: float
) -> Tensor:
    """s D_i B_iᵀ + b for projections side by side, [N, M]; D_i are columns of D, B_i rows of B."""
    return _lora_kernels(down_NR, columns).lora_up(down_NR, weight_MR, bias_M, columns, scaling)


def lora_up_backward(
    dout_AM: Tensor, down_AR: Tensor, weight_MR: Tensor, columns: tuple[int, ...], scaling: float
) -> tuple[Tensor, Tensor]:
    """U with U_i = s dY_i B_i, like D, and dB with dB_i = s dY_iᵀ D_i, like B, in fp32 where kernels run."""
    return _lora_kernels(dout_AM, columns).lora_up_backward(dout_AM, down_AR, weight_MR, columns, scaling)


def _lora_kernels(tensor: Tensor, columns: tuple[int, ...]):
    if not _runs_kernels(tensor):
        return reference
    from sebp_edge.ops import lora_kernels

    return lora_kernels if len(columns) <= lora_kernels.MAX_PROJECTIONS else reference


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of raw logits, fp32 [C], and if wanted their gradient, which may overwrite them."""
    if _runs_kernels(logits_CV):
        from sebp_edge.ops import cross_entropy_kernel

        return cross_entropy_kernel.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)
    return reference.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)
