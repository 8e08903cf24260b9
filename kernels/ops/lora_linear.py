"""Linear layers with LoRA adapters: all projections that read the same X, in one Function.

    forward    Y_i = X W_iᵀ + b_i + s_i (X A_iᵀ) B_iᵀ                                     i: the projections
    backward   U_i = s_i dY_i B_i                                          [A, R]         over the active rows only
               dA_i = U_iᵀ X        dB_i = s_i dY_iᵀ (X A_iᵀ)
               dX = sum over i of dY_i W_i + U_i A_i                       zero on all other rows

The adapters' A_i are stacked, so that X is read once for all of them; every sum is accumulated by the product that adds
to it, so none of the full-size terms of a layer-by-layer evaluation is ever written (Hu et al. 2021 for the adapter;
Topchii et al., equations 1 and 2, for the rows). W_i and b_i are frozen; a W_i that is kept in fewer bits (Dettmers et
al. 2023) is dequantised once in each pass and dropped again.

Shapes: N rows, A active rows, K inputs, M_i outputs, R rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.ops.rows import Rows, RowTarget, take, take_gradient


class QuantisedWeight(NamedTuple):
    """A frozen weight in fewer bits: the dtype that it is computed in, and what makes a new [M, K] in that dtype."""

    dtype: torch.dtype
    dequantise: Callable[[], Tensor]


class LoraProjection(NamedTuple):
    """One projection: frozen weight [M, K] and bias [M] or None, lora_A [R, K], lora_B [M, R], and its scaling."""

    weight: Tensor | QuantisedWeight
    bias: Tensor | None
    lora_A: Tensor
    lora_B: Tensor
    scaling: float


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, weights, biases, scalings, *adapters):
        x_NK = x.reshape(-1, x.shape[-1])
        loras_A, loras_B = adapters[: len(weights)], adapters[len(weights) :]
        stacked_A = torch.cat([lora_A.to(x.dtype) for lora_A in loras_A])
        down_NR = x_NK @ stacked_A.T
        outputs = []
        for weight, bias, scaling, lora_B, own in zip(
            weights, biases, scalings, loras_B, _own_columns(loras_A), strict=True
        ):
            out = F.linear(x_NK, _matrix(weight), bias)
            out.addmm_(down_NR[:, own], lora_B.to(x.dtype).T, alpha=scaling)
            outputs.append(out.reshape(*x.shape[:-1], -1))
        if not callable(rows):
            x_NK, down_NR = take(x_NK, rows), take(down_NR, rows)
        ctx.save_for_backward(x_NK, down_NR, *adapters)
        ctx.rows, ctx.x_shape, ctx.scalings, ctx.weights = rows, x.shape, scalings, weights
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        x_AK, down_AR, *adapters = ctx.saved_tensors
        rows, loras_A, loras_B = ctx.rows, adapters[: len(douts)], adapters[len(douts) :]
        douts = [dout.reshape(-1, dout.shape[-1]) for dout in douts]
        num_rows = douts[0].shape[0]
        if callable(rows):
            rows, weights_A = rows(tuple(douts)).on_host()
            x_AK, down_AR = take(x_AK, rows), take(down_AR, rows)
            douts = [take(dout_NM, rows, weights_A) for dout_NM in douts]
        else:
            douts = [take_gradient(dout_NM, rows) for dout_NM in douts]
        up_AR, dloras_B = torch.empty_like(down_AR), []
        for dout_AM, lora_B, scaling, own in zip(douts, loras_B, ctx.scalings, _own_columns(loras_A), strict=True):
            up_AR[:, own] = (dout_AM @ lora_B.to(dout_AM.dtype)).mul_(scaling)
            dloras_B.append((dout_AM.T @ down_AR[:, own]).to(lora_B.dtype).mul_(scaling))
        dloras_A = (up_AR.T @ x_AK).to(loras_A[0].dtype).split([lora_A.shape[0] for lora_A in loras_A])
        dx = None
        if ctx.needs_input_grad[0]:
            target = RowTarget(rows, num_rows, x_AK.shape[1], x_AK)
            torch.mm(up_AR, torch.cat([lora_A.to(up_AR.dtype) for lora_A in loras_A]), out=target.part)
            for dout_AM, weight in zip(douts, ctx.weights, strict=True):
                target.part.addmm_(dout_AM, _matrix(weight))
            dx = target.whole().reshape(ctx.x_shape)
        return dx, None, None, None, None, *dloras_A, *dloras_B


def _matrix(weight: Tensor | QuantisedWeight) -> Tensor:
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight


def _own_columns(loras_A) -> list[slice]:
    """Which columns of the stacked adapters' product are each projection's."""
    columns, begin = [], 0
    for lora_A in loras_A:
        columns.append(slice(begin, begin + lora_A.shape[0]))
        begin += lora_A.shape[0]
    return columns


def lora_linear(x: Tensor, projections: list[LoraProjection], rows: Rows | None = None) -> tuple[Tensor, ...]:
    """The outputs of all `projections` of `x`, with gradients for `x` and the adapters.

    Args:
        x: [..., K]; its leading dimensions are the rows, flattened in order.
        projections: with frozen weights of x's dtype, or dequantised to it; the adapters' dtype may be another, usually
            fp32: products run in x's dtype and the adapters' gradients come in theirs.
        rows: the only rows whose output gradients may be non-zero: int64 [A], increasing; a slice; a function
            that chooses them in the backward pass (`detect`: those that are non-zero in any of them); None for all.

    Returns:
        One [..., M] in x's dtype for each projection. Twice differentiable it is not.
    """
    weights, biases, loras_A, loras_B, scalings = zip(*projections, strict=True)
    return _LoraLinear.apply(x, rows, weights, biases, scalings, *loras_A, *loras_B)
