"""Quantised frozen weights, and where they are dequantised.

A weight in 4 bits is NF4 in bitsandbytes' format (Dettmers et al. 2023): blocks of weights with a scale each, and the
scales may be quantised themselves, in blocks with a second scale each:

    w = code[q] s        s = scale_code[p] t + offset        each product and sum rounded to fp32, and w to the dtype

Shapes: M_i outputs of each weight, M their sum, K inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class QuantisedScales(NamedTuple):
    """What the scales of a weight in 4 bits are quantised by.

    Attributes:
        code: fp32 [256], what a byte stands for.
        scales: t, fp32, one for each block of scales.
        offset: fp32, a scalar.
        block: the number of scales in a block.
    """

    code: Tensor
    scales: Tensor
    offset: Tensor
    block: int


class FourBits(NamedTuple):
    """A weight in 4 bits. All tensors are contiguous.

    Attributes:
        packed: q, uint8, two to a byte, the first in its high half.
        code: fp32 [16], what 4 bits stand for.
        scales: s, fp32, one for each block; or p, uint8, if they are quantised.
        block: the number of weights in a block, a power of two.
        of_scales: what the scales are quantised by; None if they are not.
    """

    packed: Tensor
    code: Tensor
    scales: Tensor
    block: int
    of_scales: QuantisedScales | None


class QuantisedWeight(NamedTuple):
    """A quantised frozen weight.

    Attributes:
        dtype: the dtype that it computes in.
        dequantise: writes it into a matrix [M_i, K].
        identity: changes whenever the matrix may; None if it may at every pass, so that no copy of it may be kept.
        four_bits: the same weight for our kernels, which give the same matrix; None if they cannot read it.
    """

    dtype: torch.dtype
    dequantise: Callable[[Tensor], None]
    identity: tuple[int, ...] | None = None
    four_bits: FourBits | None = None


class ScratchBuffer:
    """A buffer for one matrix at a time, shared by groups, so that no matrix needs an allocation of its own.

    It is allocated on first use, of the `size` of the largest matrix that was reserved, in elements.
    """

    def __init__(self):
        self.size, self._buffer = 0, None

    def reserve(self, size: int) -> None:
        """Makes sure that a matrix of this many elements will fit."""
        self.size = max(self.size, size)

    def matrix_like(self, num_rows: int, num_columns: int, like: Tensor) -> Tensor:
        """A matrix [num_rows, num_columns], like `like` in dtype and device; valid until the next call."""
        self.reserve(num_rows * num_columns)
        is_alike = self._buffer is not None and (self._buffer.dtype, self._buffer.device) == (like.dtype, like.device)
        if not is_alike or len(self._buffer) < self.size:
            # A tensor made in inference mode cannot be used outside of it.
            with torch.inference_mode(False):
                self._buffer = torch.empty(self.size, dtype=like.dtype, device=like.device)
        return self._buffer[: num_rows * num_columns].view(num_rows, num_columns)
