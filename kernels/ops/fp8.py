"""Frozen weights in FP8 (e4m3, Micikevicius et al. 2022), which tensor cores multiply as they are.

    W = s C             s: a power of two, so that no code is above 448
    X ≈ diag(t) X₈      t: the largest magnitude of each row / 448
    Y = X Wᵀ = s diag(t) X₈ Cᵀ
    dX = dY W = s diag(t) dY₈ C          dY in FP8 as X is

Both passes multiply by the same W. Tensor cores contract the contiguous dimension of both factors, so dX needs a
transposed copy of the codes. A number format with exponents loses nothing by one scale for all weights, unless they are
2^14 times smaller than the largest.

Shapes: N rows, A active rows, K inputs, M outputs, R rank.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend
from .move_rows import put
from .quantised import Fp8Rows
from .rows import KnownRows

LARGEST = 448.0
# Matrices that tensor cores take have rows of a multiple of 16 bytes.
ALIGNMENT = 16


class Fp8Weight(NamedTuple):
    """A frozen weight in FP8.

    Attributes:
        dtype: the dtype of X and Y.
        codes: C, e4m3 [M, K], contiguous.
        scale: s.
        transposed: the codes again, [K, M], contiguous; None without a backward pass.
    """

    dtype: torch.dtype
    codes: Tensor
    scale: float
    transposed: Tensor | None = None

    @classmethod
    def quantise(cls, weight_MK: Tensor, scale: float) -> "Fp8Weight":
        """Quantises a matrix, whose sizes must be multiples of `ALIGNMENT`, with a scale that `common_scale` gave."""
        return cls(weight_MK.dtype, (weight_MK * (1 / scale)).to(torch.float8_e4m3fn), scale)

    @classmethod
    def stack(cls, weights: Sequence["Fp8Weight"]) -> "Fp8Weight":
        """Stacks weights of the same input, with a transposed copy; a single weight's codes are not copied.

        Raises:
            ValueError: their scales differ.
        """
        if len({each.scale for each in weights}) > 1:
            raise ValueError("Weights in FP8 of different scales cannot be stacked.")
        codes = weights[0].codes.detach()
        if len(weights) > 1:
            codes = torch.cat([each.codes.detach().view(torch.uint8) for each in weights]).view(codes.dtype)
        transposed = codes.view(torch.uint8).T.contiguous().view(codes.dtype)
        return cls(weights[0].dtype, codes, weights[0].scale, transposed)

    def matrix(self) -> Tensor:
        """W in its dtype."""
        return self.codes.to(self.dtype).mul_(self.scale)

    def outputs_(
        self, out_NM: Tensor, x_NK: Tensor, small: tuple | None = None, x_in_fp8: Fp8Rows | None = None
    ) -> None:
        """Writes X Wᵀ and the small product, if there is one: the arguments of `lora_up`."""
        kernels = backend.implementation(x_NK, "fp8")
        kernels.multiply_fp8_(out_NM, x_in_fp8 or kernels.quantise_rows(x_NK), self.codes, self.scale, small)

    def needs_compact(self, dout_AM: Tensor) -> bool:
        """Whether `inputs` takes these rows, also if only the device knows how many there are: always."""
        return True

    def inputs(
        self, dout_AM: Tensor, up_AR: Tensor, stacked_A: Tensor, rows: KnownRows = None, num_rows: int = 0
    ) -> Tensor:
        """dY W + U A, [N, K], zero on all but the active rows."""
        kernels, dx_AK = backend.implementation(dout_AM, "fp8"), dout_AM.new_empty(len(dout_AM), len(self.transposed))
        small = up_AR, stacked_A.T, None, (len(self.transposed),), 1.0
        kernels.multiply_fp8_(dx_AK, kernels.quantise_rows(dout_AM), self.transposed, self.scale, small)
        return dx_AK if rows is None else put(dx_AK, rows, num_rows)

    def inputs_unscaled(self, dout_NM: Tensor) -> tuple[Tensor, Tensor]:
        """dY W, [N, K], whose rows are still to be multiplied by what is beside it, fp32 [N]."""
        kernels = backend.implementation(dout_NM, "fp8")
        codes_NM, scales_N = kernels.quantise_rows(dout_NM, self.scale)
        return kernels.multiply_codes(codes_NM, self.transposed), scales_N


def common_scale(weights: Iterable[Tensor]) -> float:
    """The scale for weights that may be stacked: the least power of two for all of them; NaN if one is not finite."""
    largest = [float(weight.abs().max()) for weight in weights]
    return 2.0 ** math.frexp(max(largest) / LARGEST)[1] if all(map(math.isfinite, largest)) else math.nan
