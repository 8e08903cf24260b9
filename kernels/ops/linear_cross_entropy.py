"""Cross-entropy straight from hidden states, in chunks of rows, so that all logits are never in memory at once.

    forward    l = c tanh(s h Wᵀ / c)  (s: scale; c: softcap, if there is one)        loss = logsumexp(l) - l[target]
    backward   dl = (softmax(l) - onehot(target)) * dloss                             dh = s (dl * (1 - (l / c)²)) W

A row may share its target with K other tokens, as when a teacher's probabilities are learnt. With shares p[k]:

    forward    loss += sum over k of p[k] (l[target] - l[k])        backward    dl[target] += sum of p,  dl[k] -= p[k]

A row's gradient is linear in the upstream gradient of its loss. So with a frozen head the forward pass computes dh
along with the loss, while it has the chunk's logits, and the backward pass only scales rows. The gradient of a trained
head sums over rows, whose upstream gradients it needs first; the backward pass recomputes the logits chunk by chunk.

Shapes: C rows, D hidden, V vocabulary, K other targets.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .precise_sums import precise_sums

# The other targets of some rows, int64 [C, K], and their shares, fp32 [C, K].
Others = tuple[Tensor, Tensor]

# Logits per chunk by default: 128 MB in bf16.
CHUNK_LOGITS = 2**26


class _Options(NamedTuple):
    """What else `linear_cross_entropy` is given."""

    others: Others | None
    scale: float
    softcap: float | None
    max_logits: int
    check: Callable[[], None]

    def chunks(self, hidden_CD: Tensor, weight_VD: Tensor) -> list[slice]:
        size = max(1, self.max_logits // weight_VD.shape[0])
        return [slice(begin, begin + size) for begin in range(0, hidden_CD.shape[0], size)]

    def losses_and_dlogits(
        self, chunk: slice, hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the losses of a chunk, and their gradient with respect to raw logits, which may overwrite these."""
        self.check()
        logits_CV, targets_C = hidden_CD[chunk] @ weight_VD.T, targets_C[chunk]
        self.check()
        compute = partial(
            backend.implementation(logits_CV, "cross_entropy").cross_entropy_and_dlogits_,
            *(logits_CV, targets_C, self.scale, self.softcap),
            needs_gradient=needs_gradient,
        )
        if self.others is None:
            return compute()
        ids, shares = torch.cat([targets_C[:, None], self.others[0][chunk]], dim=1), self.others[1][chunk].float()
        # Read before they are overwritten.
        values, slopes = final_logits(logits_CV.gather(1, ids), self.scale, self.softcap)
        losses_C, dlogits_CV = compute()
        losses_C = losses_C + (shares * (values[:, :1] - values[:, 1:])).sum(dim=1)
        if dlogits_CV is not None:
            moved = torch.cat([shares.sum(dim=1, keepdim=True), -shares], dim=1)
            dlogits_CV.scatter_add_(1, ids, (slopes * moved).to(dlogits_CV.dtype))
        return losses_C, dlogits_CV


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @precise_sums()
    def forward(ctx, hidden_CD, weight_VD, targets_C, is_frozen, options):
        losses_C = hidden_CD.new_empty(hidden_CD.shape[0], dtype=torch.float32)
        dhidden_CD = torch.empty_like(hidden_CD) if is_frozen and ctx.needs_input_grad[0] else None
        needs_gradient, tensors = dhidden_CD is not None, (hidden_CD, weight_VD, targets_C)
        for chunk in options.chunks(hidden_CD, weight_VD):
            losses_C[chunk], dlogits = options.losses_and_dlogits(chunk, *tensors, needs_gradient=needs_gradient)
            if needs_gradient:
                options.check()
                torch.mm(dlogits, weight_VD, out=dhidden_CD[chunk])
            del dlogits  # before the next chunk's
        ctx.save_for_backward(*((dhidden_CD,) if is_frozen else tensors))
        ctx.options = None if is_frozen else options
        return losses_C

    @staticmethod
    @once_differentiable
    @precise_sums()
    def backward(ctx, dlosses_C):
        if ctx.options is None:
            (dhidden_CD,) = ctx.saved_tensors
            # In fp32: rounding the same small number for all rows would scale every gradient.
            return torch.mul(dhidden_CD, dlosses_C[:, None], out=torch.empty_like(dhidden_CD)), *4 * (None,)
        hidden_CD, weight_VD, _ = tensors = ctx.saved_tensors
        dhidden_CD = torch.empty_like(hidden_CD)
        dweight_VD = torch.empty_like(weight_VD) if len(hidden_CD) else torch.zeros_like(weight_VD)
        for number, chunk in enumerate(ctx.options.chunks(hidden_CD, weight_VD)):
            _, dlogits = ctx.options.losses_and_dlogits(chunk, *tensors, needs_gradient=True)
            dlogits.mul_(dlosses_C[chunk, None])
            ctx.options.check()
            torch.mm(dlogits, weight_VD, out=dhidden_CD[chunk])
            # The first product is written, so that no zeros are read.
            dweight_VD.addmm_(dlogits.T, hidden_CD[chunk], beta=float(number > 0))
            del dlogits
        return dhidden_CD, dweight_VD, None, None, None


def final_logits(raw: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Returns the logits of raw ones, with scale and softcap, and their derivatives: fp32."""
    values = raw.float() * scale
    if softcap is None:
        return values, scale
    capped = torch.tanh(values / softcap)
    return capped * softcap, scale * (1 - capped.square())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    others: Others | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    max_logits: int = CHUNK_LOGITS,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """The cross-entropy of each row's logits, `hidden @ weight.T`, with its target.

    Args:
        hidden: [C, D], the loss rows' hidden states after the final norm.
        weight: [V, D] in hidden's dtype, a head without a bias; frozen or trained. Autocast casts both as for
            `F.linear`.
        targets: int64 [C], each in [0, V).
        others: other targets of each row, int64 [C, K], and their shares, fp32 [C, K]; the target has what they leave
            of 1. The loss is then the cross-entropy with these shares. A target with a large share rounds least.
        scale: factor on the logits (Cohere, Granite).
        softcap: if given, logits are softcap * tanh(logits / softcap) (Gemma 2).
        max_logits: most logits of a chunk, which has at least one row.
        check: called between large products; may raise to end the pass.

    Returns:
        fp32 [C], in nats. First-order gradients only.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    is_frozen = not (weight.requires_grad and torch.is_grad_enabled())
    options = _Options(others, scale, softcap, max_logits, check)
    return _LinearCrossEntropy.apply(hidden, weight, targets, is_frozen, options)
