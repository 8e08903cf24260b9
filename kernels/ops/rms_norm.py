"""RMSNorm (Zhang and Sennrich 2019), in fp32 whatever the dtype of its input.

    forward    y = x̂ (o + w)        x̂ = x r        r = 1 / sqrt(mean(x²) + eps)        o: 0, or 1 in Gemma
    backward   g = dy (o + w)        dx = r (g - x̂ mean(g x̂))        dw = sum over rows of dy x̂

x and r are kept, x̂ and y are not. Shapes: any leading dimensions, whose product is N rows; D columns.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps, offset):
        out, rstd = backend.implementation(x, "rms_norm").rms_norm(x, weight_D, eps, offset)
        ctx.save_for_backward(x, weight_D, rstd)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight_D, rstd = ctx.saved_tensors
        needs_dweight = ctx.needs_input_grad[1]
        dx, dweight_D = backend.implementation(x, "rms_norm").rms_norm_backward(
            dout, x, weight_D, rstd, ctx.offset, needs_dweight=needs_dweight
        )
        return dx, dweight_D, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (offset + weight), the mean over the last dimension.

    Args:
        x: [..., D]; a view with a contiguous last dimension, such as one of heads, is not copied.
        weight: [D], frozen or trained.
        eps: added to the mean of squares.
        offset: added to the weight.

    Returns:
        [..., D] in x's dtype, rounded once; contiguous. First-order gradients only.
    """
    return _RmsNorm.apply(x, weight, eps, offset)
