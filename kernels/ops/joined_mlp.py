"""A gated MLP with LoRA adapters, whose weights are joined with them, as one operation: few launches and passes.

    forward    [X Wᵀ | D] = X [W; A]ᵀ              g, u: the halves of X Wᵀ + s D Bᵀ + b        h = act(g) u
               [h Vᵀ | D_V] = h [V; A_V]ᵀ          Y = h Vᵀ + s_V D_V B_Vᵀ + b_V
    backward   [dY V | U_V] = dY [V | s_V B_V]     dh = dY V + U_V A_V        dg, du from dh, as in `gated`
               [dZ W | U] = dZ [W | s B]           dX = dZ W + U A            dZ: dg and du side by side
               dA_V = U_Vᵀ h        dB_V = s_V dYᵀ D_V        dA = Uᵀ X        dB = s dZᵀ D

W has the rows of gate and up, V is the projection after them. X Wᵀ and D are kept; g and u, which are never written,
and h are computed again tile by tile, in fp32. X is kept for dA, unless it can be recomputed. W, V and b are frozen.

Shapes: N rows, K inputs, F columns of gate and of up, M outputs.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .joined_weight import JoinedWeight
from .lora_linear import LoraGroup, Recompute

# Tiles of more ranks would not fit into registers.
MAX_RANK = 32


class _JoinedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, activation, recompute, *adapters):
        x_NK = x.reshape(-1, x.shape[-1])
        inner = _inner(gate_up, *gate_up.joined.multiply(x_NK))
        hidden_NF = backend.kernels("joined_mlp").gate(inner, activation)
        out_NM, down_NR = down.begin(hidden_NF, [])
        kept = (x_NK,) if recompute is None else recompute.tensors
        # The adapters themselves, so that autograd notices if they change before the backward pass.
        ctx.save_for_backward(inner.product, inner.down, down_NR, *adapters, *kept)
        ctx.groups, ctx.activation, ctx.x_shape = (gate_up, down), activation, x.shape
        ctx.function = None if recompute is None else recompute.function
        return out_NM.view(*x.shape[:-1], out_NM.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (gate_up, down), (product_N2F, down_N2R, down_NR, *others) = ctx.groups, ctx.saved_tensors
        adapters, kept = others[:6], others[6:]
        dout_NM, inner = dout.reshape(-1, dout.shape[-1]), _inner(gate_up, product_N2F, down_N2R)
        dproduct_NF, _, up_NR = down.joined.multiply_backward(dout_NM)
        dgate_up_N2F, *of_down = backend.kernels("joined_mlp").gate_backward(
            dproduct_NF, up_NR, down.stacked_A, inner, dout_NM, down_NR, down.scaling, ctx.activation
        )
        products = gate_up.joined.multiply_backward(dgate_up_N2F)
        x_NK = (kept[0] if ctx.function is None else ctx.function(*kept)).reshape(-1, ctx.x_shape[-1])
        small = dgate_up_N2F, x_NK, down_N2R, gate_up.stacked_A, gate_up.columns, gate_up.scaling
        dx, *of_gate_up = backend.kernels("joined_lora").joined_backward(*products, *small)
        dtype = adapters[0].dtype
        gradients = *gate_up.split(*of_gate_up, dtype), *down.split(*of_down, dtype)
        return dx.view(ctx.x_shape), None, None, None, None, *gradients


def _inner(gate_up: LoraGroup, product_N2F: Tensor, down_N2R: Tensor):
    """Gate and up before their adapters are added."""
    rest = gate_up.stacked_B, gate_up.bias, gate_up.scaling
    return backend.kernels("joined_mlp").GateUp(product_N2F, down_N2R, *rest)


def can_join_mlp(x: Tensor, gate_up: LoraGroup, down: LoraGroup) -> bool:
    """Whether `joined_mlp` computes with these rows, of [..., K], and groups."""
    rows, columns = x.reshape(-1, x.shape[-1]), gate_up.columns
    are_joined = all(isinstance(group.joined_for(rows), JoinedWeight) for group in (gate_up, down))
    fit = all(len(lora_A) <= MAX_RANK for lora_A in (gate_up.loras_A[0], down.loras_A[0]))
    return are_joined and fit and columns == (down.stacked_A.shape[1],) * 2 and len(down.columns) == 1


def joined_mlp(
    x: Tensor, gate_up: LoraGroup, down: LoraGroup, activation: str, recompute: Recompute | None = None
) -> Tensor:
    """The output of a gated MLP, with gradients for `x` and the adapters.

    Args:
        x: [..., K], with `can_join_mlp`.
        gate_up, down: the two projections of x, and the one of their gated product; `lora_linear` takes them, too.
        activation: as `gated` takes it.
        recompute: recomputes x in the backward pass, so that x is not kept.

    Returns:
        [..., M] in x's dtype. First-order gradients only.
    """
    adapters = *gate_up.loras_A, *gate_up.loras_B, *down.loras_A, *down.loras_B
    return _JoinedMlp.apply(x, gate_up, down, activation, recompute, *adapters)
