"""N:M sparsity: of each M neighbours in a row of a weight, the N largest in magnitude are kept, the others pruned.

    k = 1 for the N largest of each group in magnitude, of equal ones the first; else 0
    prune_           out = w k + δ w (1 - k)        δ: the decay of pruned weights, from 1 (dense) to 0
    shrink_pruned_   w  <- w - s w where out is 0   SR-STE's regularisation (Zhou et al. 2021), decoupled

Groups lie along the input dimension, the last one, as NVIDIA's sparse tensor cores need them. A shrunk bf16 weight is
rounded stochastically, as in AdamW, since s is far below what bf16 resolves. Shapes: O outputs, K inputs.
"""

import torch
from torch import Tensor

from . import backend


def prune_(out_OK: Tensor, weight_OK: Tensor, n: int, m: int, decay: float = 0.0) -> None:
    """Writes the pruned weight into `out`.

    Args:
        out_OK: contiguous, in the weight's dtype; another tensor.
        weight_OK: contiguous, in bf16, fp16, fp32 or fp64; without NaN.
        n, m: the pattern; K is a multiple of m.
        decay: δ.

    Raises:
        ValueError: a tensor has another shape, dtype or memory layout than expected, or the pattern is invalid.
    """
    _check(weight_OK, out_OK)
    if not 0 < n <= m or weight_OK.shape[-1] % m:
        raise ValueError(f"The pattern {n}:{m} does not divide rows of {weight_OK.shape[-1]} weights.")
    if weight_OK.numel():
        with torch.no_grad():
            backend.implementation(weight_OK, "prune").prune_(out_OK.view(-1, m), weight_OK.view(-1, m), n, decay)
        torch.autograd.graph.increment_version(out_OK)


def shrink_pruned_(weight_OK: Tensor, pruned_OK: Tensor, shrinkage: float, *, seed: int, step: int) -> None:
    """Shrinks the weights that `prune_` has pruned, in place.

    Args:
        weight_OK: as in `prune_`.
        pruned_OK: what `prune_` has written with a decay of 0, from this weight or the one before its update.
        shrinkage: s, from 0 to 1.
        seed, step: seed the random bits that round bf16; from 0 to 2^31 - 1.

    Raises:
        ValueError: a tensor has another shape, dtype or memory layout than expected.
    """
    _check(weight_OK, pruned_OK)
    if weight_OK.numel() and shrinkage:
        with torch.no_grad():
            implementation = backend.implementation(weight_OK, "prune")
            implementation.shrink_pruned_(weight_OK.view(-1), pruned_OK.view(-1), shrinkage, seed, step)
        torch.autograd.graph.increment_version(weight_OK)


def _check(weight_OK: Tensor, pruned_OK: Tensor) -> None:
    if not (weight_OK.is_contiguous() and weight_OK.is_floating_point() and weight_OK.dim()):
        raise ValueError(f"Pruning needs contiguous floating-point weights, not {weight_OK.dtype}.")
    expected, found = (weight_OK.shape, weight_OK.dtype), (pruned_OK.shape, pruned_OK.dtype)
    if found != expected or not pruned_OK.is_contiguous():
        raise ValueError(f"The pruned weight is {found[1]} {tuple(found[0])}, the weight {tuple(expected[0])}.")
    if pruned_OK.data_ptr() == weight_OK.data_ptr() and weight_OK.numel():
        raise ValueError("The pruned weight and the weight must be different tensors.")
