"""Cross-entropy straight from hidden states, in chunks of rows, so that all logits are never in memory at once.

    forward    l = c tanh(s h Wᵀ / c)  (s: scale; c: softcap, if there is one)        loss = logsumexp(l) - l[target]
    backward   dl = (softmax(l) - onehot(target)) * dloss                             dh = s (dl * (1 - (l / c)²)) W

A row's gradient is linear in the upstream gradient of its loss. So with a frozen head the forward pass computes dh
along with the loss, while it has the chunk's logits, and the backward pass only scales rows. The gradient of a trained
head sums over rows, whose upstream gradients it needs first; the backward pass recomputes the logits chunk by chunk.

Shapes: C rows, D hidden, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend

# Logits per chunk by default: 128 MB in bf16.
CHUNK_LOGITS = 2**26


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_CD, weight_VD, targets_C, scale, softcap, max_logits):
        losses_C = hidden_CD.new_empty(hidden_CD.shape[0], dtype=torch.float32)
        dhidden_CD = torch.empty_like(hidden_CD) if ctx.needs_input_grad[0] else None
        for chunk in _chunks(hidden_CD, weight_VD, max_logits):
            logits = hidden_CD[chunk] @ weight_VD.T
            losses_C[chunk], dlogits = backend.implementation(logits, "cross_entropy").cross_entropy_and_dlogits_(
                logits, targets_C[chunk], scale, softcap, needs_gradient=dhidden_CD is not None
            )
            if dhidden_CD is not None:
                torch.mm(dlogits, weight_VD, out=dhidden_CD[chunk])
            del logits, dlogits  # before the next chunk's
        ctx.save_for_backward(dhidden_CD)
        return losses_C

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses_C):
        (dhidden_CD,) = ctx.saved_tensors
        return dhidden_CD * dlosses_C[:, None].to(dhidden_CD.dtype), None, None, None, None, None


class _TrainedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_CD, weight_VD, targets_C, scale, softcap, max_logits):
        losses_C = hidden_CD.new_empty(hidden_CD.shape[0], dtype=torch.float32)
        for chunk in _chunks(hidden_CD, weight_VD, max_logits):
            logits = hidden_CD[chunk] @ weight_VD.T
            losses_C[chunk], _ = backend.implementation(logits, "cross_entropy").cross_entropy_and_dlogits_(
                logits, targets_C[chunk], scale, softcap, needs_gradient=False
            )
            del logits
        ctx.save_for_backward(hidden_CD, weight_VD, targets_C)
        ctx.scale, ctx.softcap, ctx.max_logits = scale, softcap, max_logits
        return losses_C

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses_C):
        hidden_CD, weight_VD, targets_C = ctx.saved_tensors
        dhidden_CD, dweight_VD = torch.empty_like(hidden_CD), torch.zeros_like(weight_VD)
        for chunk in _chunks(hidden_CD, weight_VD, ctx.max_logits):
            logits = hidden_CD[chunk] @ weight_VD.T
            _, dlogits = backend.implementation(logits, "cross_entropy").cross_entropy_and_dlogits_(
                logits, targets_C[chunk], ctx.scale, ctx.softcap, needs_gradient=True
            )
            dlogits.mul_(dlosses_C[chunk, None].to(dlogits.dtype))
            torch.mm(dlogits, weight_VD, out=dhidden_CD[chunk])
            dweight_VD.addmm_(dlogits.T, hidden_CD[chunk])
            del logits, dlogits
        return dhidden_CD, dweight_VD, None, None, None, None


def _chunks(hidden_CD: Tensor, weight_VD: Tensor, max_logits: int) -> list[slice]:
    size = max(1, max_logits // weight_VD.shape[0])
    return [slice(begin, begin + size) for begin in range(0, hidden_CD.shape[0], size)]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    max_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """The cross-entropy of each row's logits, `hidden @ weight.T`, with its target.

    Args:
        hidden: [C, D], the loss rows' hidden states after the final norm.
        weight: [V, D] in hidden's dtype, a head without a bias; frozen or trained. Autocast casts both as for
            `F.linear`.
        targets: int64 [C], each in [0, V).
        scale: factor on the logits (Cohere, Granite).
        softcap: if given, logits are softcap * tanh(logits / softcap) (Gemma 2).
        max_logits: most logits of a chunk, which has at least one row.

    Returns:
        fp32 [C], in nats. First-order gradients only.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    head = _TrainedHead if weight.requires_grad and torch.is_grad_enabled() else _FrozenHead
    return head.apply(hidden, weight, targets, scale, softcap, max_logits)
