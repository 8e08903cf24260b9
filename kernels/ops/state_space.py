"""The state spaces of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) on packed texts.

A state S [E, F] for each text and head, empty before the text's first row:

    S <- exp(dt_t a) S + B_t ⊗ dt_t x_t        out_t = Sᵀ C_t + D x_t

This is linear attention with decays, whose keys and queries have norm 1: the norms of B belong to what is written, and
those of C to the outputs.

Shapes: A rows; G heads of B and C, of size E; H = some multiple of G heads of x, of size F.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .chunked_rule import EPSILON
from .delta_rule import Chunks, gated_linear_attention


def state_space(
    x_AHF: Tensor,
    dt_AH: Tensor,
    a_H: Tensor,
    B_AGE: Tensor,
    C_AGE: Tensor,
    D_H: Tensor | None,
    chunks: Chunks,
    attend: Callable[..., Tensor] = gated_linear_attention,
) -> Tensor:
    """Returns the outputs, [A, H, F] in x's dtype. First-order gradients only.

    Args:
        x_AHF, B_AGE, C_AGE: of one dtype; head h of x reads head h * G // H of B and C.
        dt_AH: steps, at least 0.
        a_H: at most 0.
        D_H: how much of its input each row adds to its output; None for nothing.
        chunks: where texts begin.
        attend: what computes linear attention.
    """
    (num_heads, _), (num_groups, size) = x_AHF.shape[1:], B_AGE.shape[1:]
    wide = torch.promote_types(x_AHF.dtype, torch.float32)
    norms_2AG = (torch.stack([B_AGE, C_AGE]).to(wide).square().sum(-1) + EPSILON).sqrt()
    of_B_AH, of_C_AH = norms_2AG.repeat_interleave(num_heads // num_groups, dim=2)
    dt_AH = dt_AH.to(wide)
    out_AHF = attend(C_AGE, B_AGE, x_AHF, dt_AH * a_H.to(wide), dt_AH * of_B_AH, chunks)
    out_AHF = out_AHF.to(wide) * (size**0.5 * of_C_AH)[..., None]
    return (out_AHF if D_H is None else out_AHF + D_H.to(wide)[:, None] * x_AHF).to(x_AHF.dtype)
