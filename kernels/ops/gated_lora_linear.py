"""A gated product through one linear layer with a LoRA adapter: the second half of a decoder's MLP.

    forward    h = act(g) u            Y = h Wᵀ + b + s D Bᵀ        D = h Aᵀ
    backward   U = s dY B              dB = s dYᵀ D
               dh = dY W + U A         dA = Uᵀ h
               dg, du from dh          as in `gated`

One pass over dY W, g and u computes the last two lines: it adds U A and recomputes h tile by tile, so the backward pass
writes neither. W and b are frozen; g and u are kept, h is not.

Shapes: N rows, F columns of gate and up, M outputs, R rank.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .gated import GatedInputs
from .lora_group import LoraGroup


class _GatedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, hidden, activation, group, unfinished, lora_A, lora_B):
        """The output, [..., M], as `LoraGroup.begin` computes it."""
        gate_NF, up_NF = (side.reshape(-1, side.shape[-1]) for side in (gate, up))
        out_NM, down_NR = group.begin(hidden.reshape(gate_NF.shape), unfinished)
        # The adapter itself, so that autograd notices if it changes before the backward pass.
        ctx.save_for_backward(gate_NF, up_NF, down_NR, lora_A, lora_B)
        ctx.activation, ctx.group, ctx.shape = activation, group, gate.shape
        return out_NM.view(*gate.shape[:-1], out_NM.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        gate_NF, up_NF, down_NR, lora_A, _ = ctx.saved_tensors
        group, dout_NM = ctx.group, dout.reshape(-1, dout.shape[-1])
        stacked_A, activation = group.stacked_A, ctx.activation
        if (joined := group.joined_for(dout_NM)) is not None:
            product, up = joined.multiply_backward(dout_NM)
            dgate_up_N2F, dlora_A, dlora_B = backend.kernels("gated").joined_gated_backward(
                product, up, stacked_A, gate_NF, up_NF, activation, dout_NM, down_NR, group.scaling, group.place
            )
        else:
            up_NR, dlora_B = backend.implementation(dout_NM, "lora").lora_up_backward(
                dout_NM, down_NR, group.stacked_B, group.columns, group.scaling
            )
            dproduct_NF = group.weight.inputs_without_adapter(dout_NM)
            dgate_up_N2F, dlora_A = backend.implementation(gate_NF, "gated").gated_lora_backward(
                dproduct_NF, up_NR, stacked_A, gate_NF, up_NF, activation
            )
        dgate, dup = dgate_up_N2F.view(*ctx.shape[:-1], dgate_up_N2F.shape[1]).chunk(2, dim=-1)
        return dgate, dup, *4 * (None,), *group.split(dlora_A, dlora_B, lora_A.dtype)


def gated_lora_linear(hidden: Tensor, source: GatedInputs, group: LoraGroup) -> Tensor:
    """The output of one projection of a gated product, with gradients for gate, up and the adapter.

    Args:
        hidden: [..., F], the output of `gated` for this source.
        source: the inputs of that `gated`; they get the gradients.
        group: a single projection, as `lora_linear` takes it.

    Returns:
        [..., M] in hidden's dtype. First-order gradients only.

    Raises:
        ValueError: the group has several projections.
    """
    if len(group.columns) != 1:
        raise ValueError(f"A gated product goes through one projection, but the group has {len(group.columns)}.")
    hidden, (lora_A,), (lora_B,) = hidden.detach(), group.loras_A, group.loras_B
    unfinished: list[Tensor] = []
    out = _GatedLoraLinear.apply(source.gate, source.up, hidden, source.activation, group, unfinished, lora_A, lora_B)
    group.finish(hidden, unfinished)
    return out
