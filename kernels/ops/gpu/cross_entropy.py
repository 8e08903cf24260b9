"""Cross-entropy of rows of logits, in Triton; its gradient overwrites the logits.

One program a row: the first pass over the row keeps a running maximum and a running sum (online softmax, Milakov and
Gimelshein 2018), the second writes the gradient. Shapes: C rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 8192
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(z, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    values = z.to(tl.float32) * scale
    if HAS_SOFTCAP:
        # tanh through the logistic function, which every version of Triton has.
        values = softcap * (2.0 * tl.sigmoid(2.0 * values / softcap) - 1.0)
    return values


# Targets begin at any element of a larger tensor.
@triton.jit(do_not_specialize_on_alignment=["targets_ptr"])
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    vocabulary,
    stride_c,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_c
    target = tl.load(targets_ptr + row)
    at_target = _capped(tl.load(row_ptr + target), scale, softcap, HAS_SOFTCAP)
    maximum = at_target
    total = 0.0
    for begin in range(0, vocabulary, BLOCK_V):
        columns = begin + tl.arange(0, BLOCK_V)
        z = tl.load(row_ptr + columns, mask=columns < vocabulary, other=-float("inf"))
        values = _capped(z, scale, softcap, HAS_SOFTCAP)
        if HAS_SOFTCAP:
            values = tl.where(columns < vocabulary, values, -float("inf"))
        higher = tl.maximum(maximum, tl.max(values, axis=0))
        # Powers of two take fewer instructions.
        total = total * tl.exp2((maximum - higher) * LOG2_E) + tl.sum(tl.exp2((values - higher) * LOG2_E), axis=0)
        maximum = higher
    # Subtract the maximum first: the logsumexp of large logits has too few digits.
    tl.store(losses_ptr + row, tl.log(total) - (at_target - maximum))
    if NEEDS_GRADIENT:
        inverse = 1.0 / total
        for begin in range(0, vocabulary, BLOCK_V):
            columns = begin + tl.arange(0, BLOCK_V)
            mask = columns < vocabulary
            values = _capped(tl.load(row_ptr + columns, mask=mask, other=-float("inf")), scale, softcap, HAS_SOFTCAP)
            gradient = tl.exp2((values - maximum) * LOG2_E) * inverse - tl.where(columns == target, 1.0, 0.0)
            if HAS_SOFTCAP:
                gradient *= 1.0 - (values / softcap) * (values / softcap)
            tl.store(row_ptr + columns, (gradient * scale).to(logits_ptr.dtype.element_ty), mask=mask)


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Overwrites the logits with their gradient."""
    losses_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
    if len(logits_CV):
        _cross_entropy_kernel[(len(logits_CV),)](
            logits_CV,
            targets_C,
            losses_C,
            logits_CV.shape[1],
            logits_CV.stride(0),
            scale,
            softcap or 1.0,
            HAS_SOFTCAP=softcap is not None,
            NEEDS_GRADIENT=needs_gradient,
            BLOCK_V=min(BLOCK_V, triton.next_power_of_2(logits_CV.shape[1])),
            num_warps=8,
        )
    return losses_C, logits_CV if needs_gradient else None
