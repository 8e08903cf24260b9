"""The only place that chooses an implementation: our Triton kernels on NVIDIA GPUs, plain PyTorch everywhere else.

Products of active rows run as `choices` has it, those of LoRA's frozen weights as `gpu.gemm`; all others are PyTorch's.
Where Triton is missing, the reference path runs, and a log line says so once.
"""

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from . import choices, reference
from .tiles import Tiles

logger = logging.getLogger(__name__)

# Sequences that our attention kernels take have at most so many tokens.
SHORT = 128


@functools.cache
def has_triton() -> bool:
    """Whether our kernels can run on this machine's GPUs."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        logger.info("No Triton for this GPU: the row-sparse operations run in plain PyTorch.")
        return False
    return True


def runs_kernels(tensor: Tensor) -> bool:
    """Whether our kernels compute with this tensor."""
    # torch.compile fuses plain PyTorch itself.
    compiling = torch.compiler.is_compiling()
    return not compiling and tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def gather_rows(x_NK: Tensor, ids_A: Tensor, count: Tensor | None = None, weights_A: Tensor | None = None) -> Tensor:
    """X[A], times the rows' weights; rows from place `count` on are zero; [A, K], contiguous."""
    if runs_kernels(x_NK):
        from sebp_edge.ops.gpu import move_rows

        return move_rows.gather_rows(x_NK, ids_A, count, weights_A)
    return reference.gather_rows(x_NK, ids_A, count, weights_A)


def scatter_rows(x_AK: Tensor, places_N: Tensor) -> Tensor:
    """Row n is x's row places[n], or zero where that is -1; [N, K]."""
    if runs_kernels(x_AK):
        from sebp_edge.ops.gpu import move_rows

        return move_rows.scatter_rows(x_AK, places_N)
    return reference.scatter_rows(x_AK, places_N)


def choose_products(
    dout_NM: Tensor,
    weight_MK: Tensor,
    num_active: int | None,
    *,
    wanted_dx: bool,
    wanted_dweight: bool,
    choices_folder: str | None,
) -> choices.Ways:
    """How the products of active rows are computed; `num_active` is None where only the device knows it."""
    if not (runs_kernels(dout_NM) and (wanted_dx or wanted_dweight)):
        return choices.Ways()
    if num_active is None:
        return choices.choose_for_any_number(dout_NM.dtype.itemsize, dout_NM.device)
    (num_outputs, num_inputs), itemsize = weight_MK.shape, dout_NM.dtype.itemsize
    shape = choices.Shape.of(wanted_dx, wanted_dweight, itemsize, num_inputs, num_outputs, num_active)
    return choices.choose(shape, dout_NM.device, choices_folder)


def tiles_for_any_number(dout_NM: Tensor) -> Tiles | None:
    """Tiles of `dx` for rows whose number only the device knows; None where our kernels do not run."""
    return choices.choose_for_any_number(dout_NM.dtype.itemsize, dout_NM.device).dx if runs_kernels(dout_NM) else None


def dx(dout_NM: Tensor, weight_MK: Tensor, rows, tiles: Tiles) -> Tensor:
    """dX of the active rows by our kernel, zero elsewhere; [N, K]. Only where tiles were chosen."""
    from sebp_edge.ops.gpu import products

    return products.dx(dout_NM, weight_MK, rows, tiles)


def dweight(
    dout_NM: Tensor, x: Tensor, rows, tiles: Tiles, *, x_is_whole: bool, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """dW and, if asked for, db of the active rows by our kernel. Only where `choose_products` gave tiles."""
    from sebp_edge.ops.gpu import products

    return products.dweight(dout_NM, x, rows, tiles, x_is_whole=x_is_whole, with_bias=with_bias)


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    """Which rows have any non-zero element; bool [N]. NaN is not zero."""
    if runs_kernels(dout_NM):
        from sebp_edge.ops.gpu import reduce_rows

        return reduce_rows.nonzero_rows(dout_NM)
    return reference.nonzero_rows(dout_NM)


def row_norms(dout_NM: Tensor) -> Tensor:
    """The squared norm of each row, fp32 [N]; fp64 for fp64."""
    if runs_kernels(dout_NM):
        from sebp_edge.ops.gpu import reduce_rows

        return reduce_rows.row_norms(dout_NM)
    return reference.row_norms(dout_NM)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A B in `dtype`; on a GPU it is not rounded to the factors' dtype on the way."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a @ b).to(dtype)


def multiply(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """A B, [N, M]; on a GPU by its fastest algorithm, if that was looked for."""
    if not runs_kernels(a_NK):
        return a_NK @ b_KM
    from sebp_edge.ops.gpu import gemm

    out_NM = a_NK.new_empty(a_NK.shape[0], b_KM.shape[1])
    gemm.multiply_(out_NM, a_NK, b_KM)
    return out_NM


def add_product_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """Adds A B to out, likewise."""
    if runs_kernels(out_NM):
        from sebp_edge.ops.gpu import gemm

        gemm.add_product_(out_NM, a_NK, b_KM)
    else:
        out_NM.addmm_(a_NK, b_KM)


def lora_up(
    down_NR: Tensor, weight_MR: Tensor, bias_M: Tensor | None, columns: tuple[int, ...], scaling: float
) -> Tensor:
    """s D_i B_iᵀ + b for projections side by side, [N, M]; D_i are columns of D, B_i rows of B."""
    return _lora_products(down_NR, columns).lora_up(down_NR, weight_MR, bias_M, columns, scaling)


def lora_up_backward(
    dout_AM: Tensor, down_AR: Tensor, weight_MR: Tensor, columns: tuple[int, ...], scaling: float
) -> tuple[Tensor, Tensor]:
    """U with U_i = s dY_i B_i, like D, and dB with dB_i = s dY_iᵀ D_i, like B, in fp32 where kernels run."""
    return _lora_products(dout_AM, columns).lora_up_backward(dout_AM, down_AR, weight_MR, columns, scaling)


def _lora_products(tensor: Tensor, columns: tuple[int, ...]):
    if not runs_kernels(tensor):
        return reference
    from sebp_edge.ops.gpu import lora

    return lora if len(columns) <= lora.MAX_PROJECTIONS else reference


def runs_flash_attention(q_AHE: Tensor) -> bool:
    """Whether torch's flash attention takes these queries: half precision, on an NVIDIA GPU since Ampere."""
    head_size = q_AHE.shape[-1]
    return (
        q_AHE.is_cuda
        and torch.version.cuda is not None
        and q_AHE.dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= 256
        and torch.cuda.get_device_capability(q_AHE.device) >= (8, 0)
    )


def runs_short_attention(q_AHE: Tensor, k_AGE: Tensor, v_AGE: Tensor, max_len: int) -> bool:
    """Whether our attention kernels compute with these: where torch's flash attention would, for short sequences."""
    if max_len > SHORT or not (runs_flash_attention(q_AHE) and runs_kernels(q_AHE)):
        return False
    from sebp_edge.ops.gpu import short_attention

    return q_AHE.shape[-1] in short_attention.HEAD_SIZES and all(x.stride(-1) == 1 for x in (q_AHE, k_AGE, v_AGE))


def short_attention_(*inputs) -> tuple[Tensor, Tensor]:
    """Outputs [A, H, E] and what the backward pass needs of them, fp32 [A, H]; only where `runs_short_attention`."""
    from sebp_edge.ops.gpu import short_attention

    return short_attention.short_attention_(*inputs)


def short_attention_backward(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv as parts of one new matrix, side by side; only where `runs_short_attention`."""
    from sebp_edge.ops.gpu import short_attention

    return short_attention.short_attention_backward(*inputs)


def rotate_(q_AHE: Tensor, k_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor) -> None:
    """Rotary embedding of queries and keys, in place."""
    _rotation(q_AHE).rotate_(q_AHE, k_AGE, cos_AE, sin_AE)


def rotate_gradients(
    dq_AHE: Tensor, dk_AGE: Tensor, dv_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor, places: tuple[Tensor, ...]
) -> None:
    """Writes the gradients of what was turned, and dv, to their places, such as parts of one matrix."""
    _rotation(dq_AHE).rotate_gradients(dq_AHE, dk_AGE, dv_AGE, cos_AE, sin_AE, places)


def _rotation(tensor: Tensor):
    if not runs_kernels(tensor):
        return reference
    from sebp_edge.ops.gpu import rotate

    return rotate


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x r (offset + w) like x, and r = 1 / sqrt(mean(x²) + eps), fp32 [...]; fp64 for fp64."""
    if runs_kernels(x):
        from sebp_edge.ops.gpu import rms_norm

        return rms_norm.rms_norm(x, weight_D, eps, offset)
    return reference.rms_norm(x, weight_D, eps, offset)


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float, *, wanted_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """dX like x, and if wanted dw, like w."""
    if runs_kernels(x):
        from sebp_edge.ops.gpu import rms_norm

        return rms_norm.rms_norm_backward(dout, x, weight_D, rstd, offset, wanted_dweight=wanted_dweight)
    return reference.rms_norm_backward(dout, x, weight_D, rstd, offset, wanted_dweight=wanted_dweight)


def gated(gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """act(gate) * up, [N, M]."""
    if runs_kernels(gate_NM):
        from sebp_edge.ops.gpu import gated

        return gated.gated(gate_NM, up_NM, activation)
    return reference.gated(gate_NM, up_NM, activation)


def gated_backward(dout_NM: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """dgate and dup side by side, [N, 2 M]."""
    if runs_kernels(gate_NM):
        from sebp_edge.ops.gpu import gated

        return gated.gated_backward(dout_NM, gate_NM, up_NM, activation)
    return reference.gated_backward(dout_NM, gate_NM, up_NM, activation)


def gated_lora_backward(
    dout_NM: Tensor, up_NR: Tensor, lora_A: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """`gated_backward` of dy + U A, [N, 2 M]; and Uᵀ y, [R, M], in fp32 where kernels run. A is [R, M]."""
    if runs_kernels(gate_NM):
        from sebp_edge.ops.gpu import gated

        return gated.gated_lora_backward(dout_NM, up_NR, lora_A, gate_NM, up_NM, activation)
    return reference.gated_lora_backward(dout_NM, up_NR, lora_A, gate_NM, up_NM, activation)


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of raw logits, fp32 [C], and if wanted their gradient, which may overwrite them."""
    if runs_kernels(logits_CV):
        from sebp_edge.ops.gpu import cross_entropy

        return cross_entropy.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)
    return reference.cross_entropy_and_dlogits_(logits_CV, targets_C, scale, softcap, wanted=wanted)


def adamw_(weight: Tensor, gradient: Tensor, moments, adamw, seed: int, factor: Tensor | None) -> None:
    """One AdamW update in place, stochastically rounded where fewer bits than fp32's are kept."""
    if runs_kernels(weight):
        from sebp_edge.ops.gpu import adamw as kernels

        kernels.adamw_(weight, gradient, moments, adamw, seed, factor)
    else:
        reference.adamw_(weight, gradient, moments, adamw, seed, factor)
