"""The frozen weights of projections of one input, stacked, and their products: matrices, which may be quantised.

Shapes: N rows, A active rows, K inputs, M outputs of n projections, R rank of each.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from . import backend
from .move_rows import RowTarget, put
from .quantised import FourBits, QuantisedWeight, ScratchBuffer
from .rows import KnownRows

# Generations of GPUs for which products with weights in 4 bits compile: Ampere and Ada, Hopper, and Blackwell's with
# GDDR. Older tensor cores have no bf16; for those of the B200, Triton 3.7 raises an error.
COMPILED_FOR = (8, 9, 12)
# Up to here a product is bound by reading the weight. More rows share the cost of dequantising it.
FEW_ROWS = 128


@dataclass(frozen=True)
class Matrices:
    """Frozen weights that are multiplied as matrices, a few at a time."""

    stacked: Tensor | None  # [M, K]; None if quantised weights are dequantised in each pass
    # Each quantised weight, be it dequantised already or not; None if they are not quantised.
    quantised: tuple[QuantisedWeight, ...] | None
    columns: tuple[int, ...]  # M_1 .. M_n
    like: Tensor  # a tensor [*, K] in the dtype of the products
    scratch: ScratchBuffer | None  # where quantised weights are dequantised; None for a new matrix each time

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Outputs and their W, [M, K].

        Quantised weights come as many projections at a time as the scratch buffer holds, each valid until the next;
        those that are dequantised already come in the same parts, so that products have the same bits.
        """
        if self.quantised is None:
            yield slice(None), self.stacked
            return
        scratch, begin = self.scratch or ScratchBuffer(), 0
        for together in self._together:
            columns = self.columns[together]
            outputs = slice(begin, begin + sum(columns))
            if self.stacked is not None:
                matrix = self.stacked[outputs]
            else:
                matrix = scratch.matrix_like(sum(columns), self.like.shape[1], self.like)
                dequantise(self.quantised[together], matrix.split(columns))
            yield outputs, matrix
            begin = outputs.stop

    @functools.cached_property
    def _together(self) -> list[slice]:
        """Which projections fit into the scratch buffer together."""
        parts, ends = [], [0, *accumulate(self.columns)]
        most = 0 if self.scratch is None else self.scratch.size // self.like.shape[1]
        for number in range(len(self.columns)):
            if parts and ends[number + 1] - ends[parts[-1].start] <= most:
                parts[-1] = slice(parts[-1].start, number + 1)
            else:
                parts.append(slice(number, number + 1))
        return parts

    def outputs_(self, out_NM: Tensor, x_NK: Tensor) -> None:
        """Adds X Wᵀ to outputs that have the small product already."""
        if (packed := self._few_rows_in_4_bits(x_NK)) is not None:
            backend.kernels("four_bit_products").add_outputs_(out_NM, x_NK, packed, self.columns)
            return
        for outputs, matrix in self.parts():
            backend.implementation(out_NM, "gemm").add_product_(out_NM[:, outputs], x_NK, matrix.T)

    def needs_compact(self, dout_AM: Tensor) -> bool:
        """Whether `inputs` takes these rows, also if only the device knows how many there are."""
        return self._few_rows_in_4_bits(dout_AM) is not None

    def inputs(self, dout_AM: Tensor, up_AR: Tensor, stacked_A: Tensor, rows: KnownRows, num_rows: int) -> Tensor:
        """dY W + U A, [N, K], zero on all but the active rows."""
        if (packed := self._few_rows_in_4_bits(dout_AM)) is not None:
            dx = backend.kernels("four_bit_products").inputs(dout_AM, packed, self.columns, stacked_A.shape[1])
            dx.addmm_(up_AR, stacked_A)
            return dx if rows is None else put(dx, rows, num_rows)
        target = RowTarget(rows, num_rows, stacked_A.shape[1], dout_AM)
        torch.mm(up_AR, stacked_A, out=target.part)
        for outputs, matrix in self.parts():
            backend.implementation(dout_AM, "gemm").add_product_(target.part, dout_AM[:, outputs], matrix)
        return target.whole()

    def inputs_without_adapter(self, dout_NM: Tensor) -> Tensor:
        """dY W of a single projection, [N, K]."""
        if (packed := self._few_rows_in_4_bits(dout_NM)) is not None:
            kernels = backend.kernels("four_bit_products")
            return kernels.inputs(dout_NM, packed, self.columns, self.like.shape[1])
        # Not kept in a variable, so that a dequantised weight is freed at once.
        return backend.implementation(dout_NM, "gemm").multiply(dout_NM, next(self.parts())[1])

    def _few_rows_in_4_bits(self, rows: Tensor) -> list[FourBits] | None:
        """The weights in 4 bits if these rows, of X or of dY, are multiplied by them as they are; else None."""
        if self.quantised is None or self.stacked is not None or len(rows) > FEW_ROWS:
            return None
        packed = alike_in_4_bits(self.quantised)
        return packed if packed is not None and multiplies_in_4_bits(packed, self.like.shape[1], rows) else None


def is_streamed(weight: Tensor | QuantisedWeight) -> bool:
    """Whether a weight's memory holds others between passes, so that it may be read only in its turn, never copied."""
    return getattr(weight, "is_streamed", False)


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """Weights [M_i, K] as one matrix, [M, K], if they lie one after another in memory; else None."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def dequantise(weights: Sequence[QuantisedWeight], parts: Sequence[Tensor]) -> None:
    """Writes each weight into its matrix [M_i, K], contiguous; all in one launch if our kernels can read them."""
    packed = alike_in_4_bits(weights)
    if packed is not None and backend.runs_kernels(parts[0]):
        backend.kernels("four_bits").dequantise(packed, parts)
        return
    for weight, part in zip(weights, parts, strict=True):
        weight.dequantise(part)


def alike_in_4_bits(weights: Sequence[QuantisedWeight]) -> list[FourBits] | None:
    """The weights in 4 bits; None if our kernels cannot read all of them in one launch."""
    packed = [weight.four_bits for weight in weights]
    blocks = {each and (each.block, each.of_scales and each.of_scales.block) for each in packed}
    return packed if len(blocks) == 1 and None not in blocks else None


def multiplies_in_4_bits(weights: Sequence[FourBits], num_inputs: int, rows: Tensor) -> bool:
    """Whether our kernels multiply these rows, of X or of dY, by weights in 4 bits as they are."""
    # fp32 would not be multiplied by tensor cores.
    if len(rows) > FEW_ROWS or rows.dtype.itemsize != 2 or not backend.runs_kernels(rows):
        return False
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] not in COMPILED_FOR:
        return False
    chunk = backend.kernels("four_bit_products").CHUNK
    # Chunks may not reach beyond a row or a block, and are read 16 bytes at a time.
    fits = num_inputs % chunk == 0 and weights[0].block % chunk == 0
    return fits and all(weight.packed.data_ptr() % 16 == 0 for weight in weights)
