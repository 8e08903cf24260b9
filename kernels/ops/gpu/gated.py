"""The gate of an MLP and its gradient, in Triton: one pass each, the activation made again in the backward pass.

    forward    y = g σ(z) u
    backward   du = dy g σ(z)            dg = dy u σ(z) (1 + g (1 - σ(z)) z')

z and z' are those of the activation, see `sebp_edge.ops.gated`. Shapes: N rows, M columns.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 1024


@triton.jit
def _sigmoid_and_its_slope(gate, IS_GELU: tl.constexpr):
    """σ(z), and the slope of its logarithm, (1 - σ(z)) z'."""
    if IS_GELU:
        square = gate * gate
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * square)
        dz = 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        z = gate
        dz = 1.0
    # Neither overflows, and neither is a difference.
    small = tl.exp(-tl.abs(z))
    sigmoid = tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
    return sigmoid, tl.where(z >= 0.0, small, 1.0) / (1.0 + small) * dz


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, out_ptr, num_columns, stride_gate, stride_up, IS_GELU: tl.constexpr, BLOCK_M: tl.constexpr
):
    # 64 bits: an offset may pass 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoid_and_its_slope(gate, IS_GELU)
    out = gate * sigmoid * up
    tl.store(out_ptr + row * num_columns + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dout_ptr,
    gate_ptr,
    up_ptr,
    dsides_ptr,
    num_columns,
    stride_dout,
    stride_gate,
    stride_up,
    IS_GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = columns < num_columns
    dout = tl.load(dout_ptr + row * stride_dout + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid, slope = _sigmoid_and_its_slope(gate, IS_GELU)
    dgate = dout * up * sigmoid * (1.0 + gate * slope)
    dup = dout * gate * sigmoid
    place = dsides_ptr + row * 2 * num_columns + columns
    tl.store(place, dgate.to(dsides_ptr.dtype.element_ty), mask=mask)
    tl.store(place + num_columns, dup.to(dsides_ptr.dtype.element_ty), mask=mask)


def gated(gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """act(gate) * up, [N, M], contiguous."""
    out_NM = gate_NM.new_empty(gate_NM.shape)
    if out_NM.numel():
        gate_NM, up_NM = _with_whole_rows(gate_NM), _with_whole_rows(up_NM)
        _gated_kernel[_grid(gate_NM)](
            gate_NM, up_NM, out_NM, gate_NM.shape[1], gate_NM.stride(0), up_NM.stride(0), **_options(activation)
        )
    return out_NM


def gated_backward(dout_NM: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """dgate and dup side by side, [N, 2 M]."""
    num_rows, num_columns = gate_NM.shape
    dsides_N2M = gate_NM.new_empty(num_rows, 2 * num_columns)
    if dsides_N2M.numel():
        dout_NM, gate_NM, up_NM = _with_whole_rows(dout_NM), _with_whole_rows(gate_NM), _with_whole_rows(up_NM)
        _gated_backward_kernel[_grid(gate_NM)](
            dout_NM,
            gate_NM,
            up_NM,
            dsides_N2M,
            num_columns,
            dout_NM.stride(0),
            gate_NM.stride(0),
            up_NM.stride(0),
            **_options(activation),
        )
    return dsides_N2M


def _with_whole_rows(x_NM: Tensor) -> Tensor:
    return x_NM if x_NM.stride(1) == 1 else x_NM.contiguous()


def _grid(gate_NM: Tensor) -> tuple[int, int]:
    return len(gate_NM), triton.cdiv(gate_NM.shape[1], BLOCK_M)


def _options(activation: str) -> dict:
    return {"IS_GELU": activation == "gelu_tanh", "BLOCK_M": BLOCK_M}
