"""A frozen weight with its adapters around it, so that the products with the weight give the adapters' small ones, too.

              K       n R
        M  [  W       s B  ]          X [W; A]ᵀ   = [X Wᵀ | D]           D = X Aᵀ
        nR [  A        -   ]          dY [W | s B] = [dY W | U]          U_i = s dY_i B_i

W, A and B are those of a `LoraGroup`; B_i is beside the rows of its own projection, with zeros beside the others'. A
launch costs as much as reading some MB, so for few rows two products less in each pass are felt.

Shapes: N rows, K inputs, M outputs of n projections, R rank of each; P is n R rounded up to whole 16 bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import backend

# More rows hide a launch, and pay for tiles that the adapters begin.
MAX_ROWS = 1024
# A row of D, or of U. Tiles of 64 of them fit into the 99 KB of shared memory that any GPU has since Ampere.
MAX_RANK_BYTES = 512
# Products need rows that begin at multiples of 16 bytes, and read weights faster whose rows begin at multiples of 128.
ALIGNMENT, FAST_ALIGNMENT = 16, 128


@dataclass(frozen=True)
class JoinedWeight:
    """The matrix [M + P, K + P] above; views of it are the weight and the copies of the adapters.

    Attributes:
        weight: [M, K].
        stacked_A: [n R, K].
        beside: each projection's s B_i, [M_i, R].
    """

    matrix: Tensor
    weight: Tensor
    stacked_A: Tensor
    beside: tuple[Tensor, ...]

    @staticmethod
    def can_hold(weights: tuple, rank: int) -> bool:
        """Whether our kernels compute with these weights and such adapters."""
        if not all(isinstance(weight, Tensor) and backend.runs_kernels(weight) for weight in weights):
            return False
        few = len(weights) <= backend.kernels("lora").MAX_PROJECTIONS
        return few and len(weights) * rank * weights[0].element_size() <= MAX_RANK_BYTES

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

    def multiply(self, x_NK: Tensor) -> Tensor:
        """X Wᵀ and D side by side, [N, M + P]."""
        transposed = self.matrix[:, : self.weight.shape[1]].T
        return backend.implementation(x_NK, "gemm").multiply(x_NK, transposed)

    def multiply_backward(self, dout_NM: Tensor) -> Tensor:
        """dY W and U side by side, [N, K + P]."""
        return backend.implementation(dout_NM, "gemm").multiply(dout_NM, self.matrix[: len(self.weight)])


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
