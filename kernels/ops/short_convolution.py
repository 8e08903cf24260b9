"""A short causal convolution along packed texts, of each channel by itself, and an activation after it.

    forward    z_t = b + sum over d of w_d x_{t-d}        y = act(z)
    backward   dz = dy act'(z)        dx_t = sum over d of w_d dz_{t+d}        dw_d = sum over t of dz_t x_{t-d}
               db = sum over t of dz_t

d counts from 0, the last column of the weight, to K - 1, the first. A row's text begins p_t rows before it: row t - d
is of the same text if d <= p_t, and row t + d if d <= p_{t+d}. All others count as zero. x is kept; z and y are not.

Shapes: A rows, C channels, K columns of the weight.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, positions_A, activation):
        ctx.save_for_backward(x, weight, bias, positions_A)
        ctx.activation = activation
        kernels = backend.implementation(x, "short_convolution")
        return kernels.short_convolution(x, weight, bias, positions_A, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, *others = ctx.saved_tensors
        dx, dweight, dbias = backend.implementation(x, "short_convolution").short_convolution_backward(
            dout, x, *others, ctx.activation, needs_dweight=any(ctx.needs_input_grad[1:3])
        )
        return dx, dweight, dbias, None, None


def short_convolution(
    x_AC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, positions_A: Tensor, activation: str | None = None
) -> Tensor:
    """Returns the convolution of each text's own rows, [A, C], contiguous, in x's dtype, rounded once.

    First-order gradients only.

    Args:
        x_AC: rows of packed texts; a view with contiguous channels is not copied.
        weight_CK: its last column is that of the row itself.
        bias_C: added before the activation.
        positions_A: int32, the number of rows of its text before each row.
        activation: "silu", or None.

    Raises:
        ValueError: the sizes do not agree, or the activation is unknown.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"Unknown activation {activation!r}; expected 'silu' or None.")
    num_rows, num_channels = x_AC.shape
    num_biases = num_channels if bias_C is None else len(bias_C)
    if (len(positions_A), len(weight_CK), num_biases) != (num_rows, num_channels, num_channels):
        raise ValueError(
            f"Expected {num_rows} positions and {num_channels} channels of weight and bias; got {len(positions_A)} "
            f"positions, and {len(weight_CK)} and {num_biases} channels."
        )
    return _ShortConvolution.apply(x_AC, weight_CK, bias_C, positions_A, activation)
