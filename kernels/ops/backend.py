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
    if _runs_kernels(dout_NM):
        from sebp_edge.ops import row_reduction_kernels

        return row_reduction_kernels.nonzero_rows(dout_NM)
    return reference.nonzero_rows(dout_NM)


def row_norms(dout_NM: Tensor) -> Tensor:
    """The squared norm of each row, fp32 [N]; fp64 for fp64."""
    if _runs_kernels(dout_NM):
        from sebp_edge.ops import row_reduction_kernels

        return row_reduction_kernels.row_norms(dout_NM)
    return reference.row_norms(dout_NM)


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of raw logits, fp32 [C], and if wanted their gradient, which may overwrite them."""
    if _runs_kernels(logits_CV):
        from sebp_edge.ops import cross_entropy_kernel

        return cross_entropy_kernel.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)
    return reference.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)
