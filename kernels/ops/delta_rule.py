"""The gated delta rule of linear attention (Yang et al. 2024, arXiv:2412.06464) on packed texts.

A state S [E, F] for each text and head, empty before the text's first row:

    S <- exp(g_t) S        S <- S + k_t ⊗ beta_t (v_t - Sᵀ k_t)        out_t = Sᵀ q_t

q and k are divided by their norms, sqrt(sum of squares + 1e-6), and q by sqrt(E). What is kept are the inputs; states
are computed again in the backward pass.

Shapes: A rows, S texts, N chunks; G heads of queries and keys, of size E; H = some multiple of G heads of values, of
size F.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .chunked_rule import CHUNK


class Chunks(NamedTuple):
    """Where texts begin among packed rows, and the chunks of rows that they are computed in.

    Attributes:
        cu_seqlens: int32 [S + 1], where each text begins, and A; texts may be empty.
        first_S: int32 [S], the first chunk of each text.
        texts_N: int32 [N], the text of each chunk; S for those that the texts do not have.
    """

    cu_seqlens: Tensor
    first_S: Tensor
    texts_N: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_rows: int) -> "Chunks":
        """As many chunks as S texts of so many rows may have; does not wait for a GPU."""
        most = (num_rows + (CHUNK - 1) * (len(cu_seqlens) - 1)) // CHUNK
        ends_S = ((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0)
        texts_N = torch.searchsorted(ends_S, torch.arange(most, device=ends_S.device), right=True)
        return cls(cu_seqlens, F.pad(ends_S[:-1], (1, 0)).int(), texts_N.int())


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, erases, chunks, *inputs):
        ctx.save_for_backward(*chunks, *inputs)
        ctx.erases = erases
        return backend.implementation(inputs[2], "delta_rule").gated_delta_rule(*inputs, chunks, erases)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        # Read once, as activation checkpoints ask for.
        *chunks, q, k, v, g, beta = ctx.saved_tensors
        chosen = backend.implementation(v, "delta_rule")
        return None, None, *chosen.gated_delta_rule_backward(dout, q, k, v, g, beta, tuple(chunks), ctx.erases)


def gated_delta_rule(
    q_AGE: Tensor, k_AGE: Tensor, v_AHF: Tensor, g_AH: Tensor, beta_AH: Tensor, chunks: Chunks
) -> Tensor:
    """Returns the rule's outputs, [A, H, F] in v's dtype. First-order gradients only.

    Args:
        q_AGE: queries; `k_AGE`: keys; `v_AHF`: values. All of one dtype; head h of the values reads head h * G // H.
        g_AH: the logarithms of decays, at most 0: fp32, or of v's dtype.
        beta_AH: how much of a row's value a state takes, from 0 to 1, or to 2.
        chunks: where texts begin.
    """
    return _GatedDeltaRule.apply(True, chunks, q_AGE, k_AGE, v_AHF, g_AH, beta_AH)


def gated_linear_attention(
    q_AGE: Tensor, k_AGE: Tensor, v_AHF: Tensor, g_AH: Tensor, beta_AH: Tensor, chunks: Chunks
) -> Tensor:
    """Returns the same without erasing what a key's state held, S <- S + k_t ⊗ beta_t v_t: fp32, or fp64 for fp64.

    beta has no bounds.
    """
    return _GatedDeltaRule.apply(False, chunks, q_AGE, k_AGE, v_AHF, g_AH, beta_AH)
