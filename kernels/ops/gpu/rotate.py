"""Rotary embedding of queries and keys, and its inverse for their gradients, in Triton: one launch.

The inverse rotates by the opposite angle, and copies the gradients of the values. A program has one row and all heads
of one of the tensors. Shapes: A rows, H heads, G key/value heads, E head size.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    num_kv_heads,
    head_size,
    stride_qa,
    stride_qh,
    stride_ka,
    stride_kh,
    stride_va,
    stride_vh,
    stride_q_out_a,
    stride_q_out_h,
    stride_k_out_a,
    stride_k_out_h,
    stride_v_out_a,
    stride_v_out_h,
    stride_cos_a,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    heads = tl.arange(0, BLOCK_H)[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    half = head_size // 2
    if tensor == 0:
        x = q_ptr + row * stride_qa + heads * stride_qh + lanes
        out = q_out_ptr + row * stride_q_out_a + heads * stride_q_out_h + lanes
        mask = (heads < num_heads) & (lanes < half)
    elif tensor == 1:
        x = k_ptr + row * stride_ka + heads * stride_kh + lanes
        out = k_out_ptr + row * stride_k_out_a + heads * stride_k_out_h + lanes
        mask = (heads < num_kv_heads) & (lanes < half)
    else:
        x = v_ptr + row * stride_va + heads * stride_vh + lanes
        out = v_out_ptr + row * stride_v_out_a + heads * stride_v_out_h + lanes
        mask = (heads < num_kv_heads) & (lanes < half)
    first = tl.load(x, mask=mask, other=0.0)
    second = tl.load(x + half, mask=mask, other=0.0)
    if tensor < 2:
        angle_ptrs = cos_ptr + row * stride_cos_a + lanes
        cos_1 = tl.load(angle_ptrs, mask=lanes < half, other=0.0).to(tl.float32)
        cos_2 = tl.load(angle_ptrs + half, mask=lanes < half, other=0.0).to(tl.float32)
        angle_ptrs = sin_ptr + row * stride_cos_a + lanes
        sin_1 = tl.load(angle_ptrs, mask=lanes < half, other=0.0).to(tl.float32)
        sin_2 = tl.load(angle_ptrs + half, mask=lanes < half, other=0.0).to(tl.float32)
        x_1, x_2 = first.to(tl.float32), second.to(tl.float32)
        if INVERSE:
            # The transpose of the forward map, for any halves of cos and sin.
            first = (x_1 * cos_1 + x_2 * sin_2).to(first.dtype)
            second = (x_2 * cos_2 - x_1 * sin_1).to(second.dtype)
        else:
            first = (x_1 * cos_1 - x_2 * sin_1).to(first.dtype)
            second = (x_2 * cos_2 + x_1 * sin_2).to(second.dtype)
    tl.store(out, first, mask=mask)
    tl.store(out + half, second, mask=mask)


def rotate_(q_AHE: Tensor, k_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor) -> None:
    _launch(q_AHE, k_AGE, None, q_AHE, k_AGE, None, cos_AE, sin_AE, inverse=False)


def rotate_gradients(
    dq_AHE: Tensor, dk_AGE: Tensor, dv_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor, outs: tuple[Tensor, ...]
) -> None:
    _launch(dq_AHE, dk_AGE, dv_AGE, *outs, cos_AE, sin_AE, inverse=True)


def _launch(q, k, v, q_out, k_out, v_out, cos, sin, *, inverse: bool) -> None:
    num_rows, num_heads, head_size = q.shape
    if num_rows == 0:
        return
    tensors = (q, k, k if v is None else v, q_out, k_out, k_out if v is None else v_out)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    _rotate_kernel[num_rows, 2 if v is None else 3](
        *tensors,
        cos,
        sin,
        num_heads,
        k.shape[1],
        head_size,
        *strides,
        cos.stride(0),
        INVERSE=inverse,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_HALF=triton.next_power_of_2(head_size // 2),
    )
