"""Linear layers with LoRA adapters: all projections that read the same X, as one wide layer.

    forward    [Y_1 .. Y_n] = X Wᵀ + b + s [D_1 B_1ᵀ .. D_n B_nᵀ]        D = X Aᵀ: A_1 .. A_n stacked, as W and b are
    backward   U_i = s dY_i B_i                                          over the active rows only, as all that follows
               dB_i = s dY_iᵀ D_i
               dA = Uᵀ X
               dX = U A + dY W                                           zero on all other rows

One pass over dY gives U and dB. Each sum starts with its small product and accumulates the large one onto it, so the
full-size terms of a layer-by-layer evaluation are never written (Hu et al. 2021 for the adapter; Topchii et al.,
equations 1 and 2, for the rows). W and b are frozen, and may be quantised (`frozen_weights`). Where a weight is joined
with its adapters (`joined_weight`), its products have the small ones beside them, and come first. X is kept for dA,
unless it can be recomputed (Chen et al. 2016).

Shapes: N rows, A active rows, K inputs, M_i outputs of n projections, M their sum, R rank of each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend, choices
from .lora_group import LoraGroup
from .move_rows import keep_rows, put, take, take_kept
from .rows import Rows, as_rows, has_unknown_count, rows_of
from .tiles import Tiles


class Recompute(NamedTuple):
    """Recomputes a tensor: `function(*tensors)` has the same bits. The tensors are detached, and kept anyway."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group, recompute, unfinished, *adapters):
        """The outputs, as `LoraGroup.begin` computes them."""
        x_NK = x.reshape(-1, x.shape[-1])
        out_NM, down_NR = group.begin(x_NK, unfinished)
        kept = (keep_rows(x_NK, rows),) if recompute is None else recompute.tensors
        # The adapters themselves, so that autograd notices if they change before the backward pass.
        ctx.save_for_backward(keep_rows(down_NR, rows), *adapters, *kept)
        ctx.rows, ctx.x_shape, ctx.group = rows, x.shape, group
        ctx.function = None if recompute is None else recompute.function
        outs = out_NM.view(*x.shape[:-1], out_NM.shape[1]).split(group.columns, dim=-1)
        return tuple(out.data for out in outs)  # views could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        group, num_in = ctx.group, ctx.x_shape[-1]
        kept_down, *adapters_and_kept = ctx.saved_tensors
        dtype, kept = adapters_and_kept[0].dtype, adapters_and_kept[2 * len(douts) :]
        douts = [dout.reshape(-1, dout.shape[-1]) for dout in douts]
        num_rows, rows, tiles = len(douts[0]), rows_of(ctx.rows, *douts), None
        if has_unknown_count(rows):
            tiles = _tiles_for_unknown_count(douts[0])
            # Without kernels, read the count on the host and trim the rows.
            rows = rows.on_host() if tiles is None else rows
        if tiles is None:
            dout_AM = _concatenate_columns([take(dout_NM, rows) for dout_NM in douts])
        else:
            # At full capacity: rows beyond the count are zeros, which change no sum of rank R.
            dout_NM = _concatenate_columns(douts)
            dout_AM = take(dout_NM, rows)
        down_AR = take_kept(kept_down, rows, num_rows)
        if rows is None and ctx.needs_input_grad[0] and (joined := group.joined_for(dout_AM)) is not None:
            product, up = joined.multiply_backward(dout_AM)
            x_NK = (kept[0] if ctx.function is None else ctx.function(*kept)).reshape(-1, num_in)
            dx, dstacked_A, dstacked_B = backend.kernels("joined_lora").joined_backward(
                product, up, dout_AM, x_NK, down_AR, group.stacked_A, group.columns, group.scaling, group.place
            )
            return dx.reshape(ctx.x_shape), *4 * (None,), *group.split(dstacked_A, dstacked_B, dtype)
        up_AR, dstacked_B = backend.implementation(dout_AM, "lora").lora_up_backward(
            dout_AM, down_AR, group.stacked_B, group.columns, group.scaling
        )
        kept_x = kept[0] if ctx.function is None else ctx.function(*kept).reshape(-1, num_in)
        dstacked_A = _product(up_AR.T, take_kept(kept_x, rows, num_rows), dtype)
        del kept_x  # frees it before dX is computed
        dx = None
        if ctx.needs_input_grad[0]:
            if tiles is None or group.weight.needs_compact(dout_AM):
                dx = group.weight.inputs(dout_AM, up_AR, group.stacked_A, rows, num_rows)
            else:
                dx_parts = (
                    backend.kernels("products").dx(dout_NM[:, outputs], w, rows, tiles)
                    for outputs, w in group.weight.parts()
                )
                dx = functools.reduce(Tensor.add_, dx_parts)
                dx.addmm_(put(up_AR, rows, num_rows), group.stacked_A)
            dx = dx.reshape(ctx.x_shape)
        return dx, *4 * (None,), *group.split(dstacked_A, dstacked_B, dtype)


def _tiles_for_unknown_count(dout_NM: Tensor) -> Tiles | None:
    """Tiles of dX for rows whose number only the device knows; None where our kernels do not run."""
    if not backend.runs_kernels(dout_NM):
        return None
    return choices.choose_for_unknown_count(dout_NM.dtype.itemsize, dout_NM.device).dx


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A B in `dtype`; a GPU does not round it to the factors' dtype first."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a @ b).to(dtype)


def _concatenate_columns(parts_AM: list[Tensor]) -> Tensor:
    """Matrices as one, [A, M]; not copied if they lie side by side already."""
    first, num_columns = parts_AM[0], sum(part.shape[1] for part in parts_AM)
    offset = first.storage_offset()
    for part in parts_AM:
        same_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or part.storage_offset() != offset or part.stride() != (first.stride(0), 1):
            return torch.cat(parts_AM, dim=1)
        offset += part.shape[1]
    if len(parts_AM) == 1 or first.stride(0) < num_columns:
        return first if len(parts_AM) == 1 else torch.cat(parts_AM, dim=1)
    return first.as_strided((len(first), num_columns), (first.stride(0), 1))


def lora_linear(
    x: Tensor, group: LoraGroup, rows: Rows | None = None, recompute: Recompute | None = None
) -> tuple[Tensor, ...]:
    """The outputs of all projections of `x`, with gradients for `x` and the adapters.

    Args:
        x: [..., K] in the weight's dtype; its leading dimensions are the rows, flattened in order.
        group: the projections. Products run in x's dtype with its copies of the adapters, which must be up to date; the
            adapters' gradients come in the adapters' own dtype.
        rows: the only rows whose output gradients may be non-zero: int64 [A], increasing; the same as `ActiveRows`; a
            slice; a function that chooses them in the backward pass (`detect`: those that are non-zero in any of them),
            whose number the host does not wait for if kernels run; None for all.
        recompute: recomputes x in the backward pass, so that x is not kept. None keeps its active rows.

    Returns:
        One [..., M_i] in x's dtype for each projection, side by side in memory. First-order gradients only.
    """
    rows = as_rows(rows, x.shape[:-1].numel())
    unfinished: list[Tensor] = []
    outputs = _LoraLinear.apply(x, rows, group, recompute, unfinished, *group.loras_A, *group.loras_B)
    group.finish(x, unfinished)
    return outputs
