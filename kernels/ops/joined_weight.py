"""A frozen weight with its adapters around it, so that the products with the weight give the adapters' small ones, too.

              K       n R
        M  [  W       s B  ]          X [W; A]ᵀ   = [X Wᵀ | D]           D = X Aᵀ
        nR [  A        -   ]          dY [W | s B] = [dY W | U]          U_i = s dY_i B_i

W, A and B are those of a `LoraGroup`; B_i is beside the rows of its own projection, with zeros beside the others'. A
launch costs as much as reading some MB, so for few rows two products less in each pass are felt.

Weights in 4 bits stay where they are: extra programs of their products compute D and U from A and B.

Shapes: N rows, K inputs, M outputs of n projections, R rank of each; P is n R, rounded up to 16 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import backend
from .frozen_weights import multiplies_in_4_bits
from .quantised import FourBits

# More rows hide a launch, and pay for tiles that the adapters begin.
MAX_ROWS = 1024
# A row of D, or of U. Tiles of 64 of them fit into the 99 KB of shared memory that any GPU has since Ampere.
MAX_RANK_BYTES = 512
# Products need rows that begin at multiples of 16 bytes, and read weights faster whose rows begin at multiples of 128.
ALIGNMENT, FAST_ALIGNMENT = 16, 128


@dataclass(frozen=True)
class JoinedWeight:
    """The matrix [M + P, K + P] above; views of it are the weight and the copies of the adapters."""

    matrix: Tensor
    weight: Tensor  # [M, K]
    stacked_A: Tensor  # [n R, K]
    beside: tuple[Tensor, ...]  # each projection's s B_i, [M_i, R]

    @staticmethod
    def can_hold(weights: tuple, rank: int) -> bool:
        """Whether our kernels compute with these weights and such adapters."""
        return all(isinstance(weight, Tensor) for weight in weights) and _kernels_take(weights, rank)

    @classmethod
    def of(cls, weights: tuple[Tensor, ...], rank: int) -> "JoinedWeight":
        """Copies the weights; the adapters are zeros as yet."""
        sizes, num_inputs = [len(weight) for weight in weights], weights[0].shape[1]
        num_outputs, num_ranks = sum(sizes), len(weights) * rank
        padded = _round_up(num_ranks, ALIGNMENT // weights[0].element_size())
        stride = _round_up(num_inputs + padded, FAST_ALIGNMENT // weights[0].element_size())
        matrix = weights[0].new_zeros(num_outputs + padded, stride)[:, : num_inputs + padded]
        weight = matrix[:num_outputs, :num_inputs]
        torch.cat([each.detach() for each in weights], out=weight)
        beside = matrix[:num_outputs, num_inputs : num_inputs + num_ranks].split(sizes)
        blocks = [block[:, number * rank :][:, :rank] for number, block in enumerate(beside)]
        return cls(matrix, weight, matrix[num_outputs:][:num_ranks, :num_inputs], tuple(blocks))

    def suits(self, rows: Tensor) -> bool:
        """Whether these rows, of X or of dY, are multiplied by the whole matrix."""
        return 0 < len(rows) <= MAX_ROWS and rows.dtype == self.matrix.dtype and backend.runs_kernels(rows)

    def multiply(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """X Wᵀ, [N, M], and D, [N, n R], which lie side by side."""
        transposed = self.matrix[:, : self.weight.shape[1]].T
        product_NP = backend.implementation(x_NK, "gemm").multiply(x_NK, transposed)
        return product_NP[:, : len(self.weight)], product_NP[:, len(self.weight) :][:, : len(self.stacked_A)]

    def multiply_backward(self, dout_NM: Tensor) -> tuple[Tensor, Tensor]:
        """dY W, [N, K], and U, [N, n R], which lie side by side."""
        product_NP = backend.implementation(dout_NM, "gemm").multiply(dout_NM, self.matrix[: len(self.weight)])
        num_ranks, num_inputs = self.stacked_A.shape
        return product_NP[:, :num_inputs], product_NP[:, num_inputs:][:, :num_ranks]


@dataclass(frozen=True)
class FourBitsWithAdapters:
    """Frozen weights in 4 bits, and the copies of the adapters that are multiplied in the same launch."""

    weights: Sequence[FourBits]  # each projection's W_i, [M_i, K]
    # [n R, K] and [M, R].
    stacked_A: Tensor
    stacked_B: Tensor
    columns: tuple[int, ...]  # M_1 .. M_n
    scaling: float  # s

    @staticmethod
    def can_hold(weights: Sequence[FourBits], rank: int) -> bool:
        """Whether our kernels compute with these weights and such adapters."""
        takes = _kernels_take([weight.packed for weight in weights], rank)
        return takes and rank <= backend.kernels("four_bit_products").MAX_LOW_RANK

    def suits(self, rows: Tensor) -> bool:
        """Whether these rows, of X or of dY, are multiplied in the same launch."""
        return len(rows) > 0 and multiplies_in_4_bits(self.weights, self.stacked_A.shape[1], rows)

    def multiply(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """X Wᵀ and D in parts, [S, N, M] and [S, N, n R]."""
        kernels = backend.kernels("four_bit_products")
        return kernels.outputs_and_low(x_NK, self.weights, self.columns, self.stacked_A)

    def multiply_backward(self, dout_NM: Tensor) -> tuple[Tensor, Tensor]:
        """dY W and U in parts, [S, N, K] and [S, N, n R]."""
        kernels, num_inputs = backend.kernels("four_bit_products"), self.stacked_A.shape[1]
        return kernels.inputs_and_low(dout_NM, self.weights, self.columns, num_inputs, self.stacked_B, self.scaling)


def _kernels_take(weights: Sequence[Tensor], rank: int) -> bool:
    if not all(map(backend.runs_kernels, weights)) or len(weights) > backend.kernels("lora").MAX_PROJECTIONS:
        return False
    # Adapters are in 16 bits beside bytes of weights in 4.
    return len(weights) * rank * max(2, weights[0].element_size()) <= MAX_RANK_BYTES


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
