"""The gate of an MLP (Shazeer 2020): one projection, activated, times another.

    forward    y = act(g) u                act(g) = g σ(z)        σ: the logistic function
    backward   du = dy act(g)              dg = dy u act'(g)        act'(g) = σ(z) (1 + g (1 - σ(z)) z')

    "silu"         z = g                                   z' = 1
    "gelu_tanh"    z = 2 sqrt(2 / π) (g + 0.044715 g³)     z' = 2 sqrt(2 / π) (1 + 0.134145 g²)

g and u are kept, y and act(g) are not. All of it runs in fp32. Shapes: N rows, M columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend

ACTIVATIONS = ("silu", "gelu_tanh")


class GatedInputs(NamedTuple):
    """The inputs of a gated product, as `gated` takes them."""

    gate: Tensor
    up: Tensor
    activation: str


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        gate_NM, up_NM = (side.reshape(-1, side.shape[-1]) for side in (gate, up))
        ctx.save_for_backward(gate_NM, up_NM)
        ctx.activation = activation
        return backend.implementation(gate_NM, "gated").gated(gate_NM, up_NM, activation).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        gate_NM, up_NM = ctx.saved_tensors
        dout_NM = dout.reshape(-1, dout.shape[-1])
        dgate_up_N2M = backend.implementation(gate_NM, "gated").gated_backward(dout_NM, gate_NM, up_NM, ctx.activation)
        return *dgate_up_N2M.view(*dout.shape[:-1], dgate_up_N2M.shape[1]).chunk(2, dim=-1), None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up.

    Args:
        gate, up: [..., M] of one dtype; halves of one matrix are not copied. Their gradients are halves of one, too.
        activation: "silu", or "gelu_tanh", the tanh approximation of GELU.

    Returns:
        [..., M] in their dtype, rounded once; contiguous. First-order gradients only.

    Raises:
        ValueError: the shapes or dtypes differ, or the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"Unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"Gate and up must have the same shape and dtype, but are {list(gate.shape)} in {gate.dtype} and "
            f"{list(up.shape)} in {up.dtype}."
        )
    return _Gated.apply(gate, up, activation)
