"""Projections of one input with their LoRA adapters, as `lora_linear` multiplies them; see there for the shapes."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend
from .copies import TensorCopy, copy_all
from .fp8 import Fp8Weight
from .joined_weight import BesideFp8, FourBitsWithAdapters, JoinedWeight
from .quantised import FourBits, Fp8Rows, QuantisedWeight, ScratchBuffer

# Up to here a product is bound by reading the weight. More rows share the cost of dequantising it.
FEW_ROWS = 128


class LoraProjection(NamedTuple):
    """One projection: frozen weight [M, K] and bias [M] or None, lora_A [R, K], lora_B [M, R], and its scaling."""

    weight: Tensor | QuantisedWeight | Fp8Weight
    bias: Tensor | None
    lora_A: Tensor
    lora_B: Tensor
    scaling: float


@dataclass(frozen=True)
class LoraGroup:
    """Projections of one input, stacked. Trained tensors stay where they are; products use copies of them.

    Attributes:
        weight: [M, K], the frozen weights stacked, in FP8 too; or each quantised weight, dequantised in each pass.
        bias: [M], or None.
        loras_A, loras_B: each projection's trained [R, K] and [M_i, R], of any floating dtype, usually fp32.
        stacked_A, stacked_B: copies of them, [n R, K] and [M, R], in the weight's dtype.
        scaling: s, the same for all.
        is_quantised: whether the weights are quantised, be they dequantised already or not.
        joined: the weight and the copies of the adapters in one matrix, if they are; FP8 and 4 bits have other forms.
        scratch: where quantised weights are dequantised; None for a new matrix each time.

    If each trained tensor has a `main_grad` (as in Megatron-LM), fp32, and they lie one after another, A before B, then
    the kernels of a joined weight add gradients there, and autograd gets none.
    """

    weight: Tensor | Fp8Weight | tuple[QuantisedWeight, ...]
    bias: Tensor | None
    loras_A: tuple[Tensor, ...]
    loras_B: tuple[Tensor, ...]
    stacked_A: Tensor
    stacked_B: Tensor
    scaling: float
    is_quantised: bool = False
    joined: JoinedWeight | BesideFp8 | FourBitsWithAdapters | None = None
    scratch: ScratchBuffer | None = None
    _places: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def stack(
        cls,
        projections: list[LoraProjection],
        scratch: ScratchBuffer | None = None,
        *,
        dequantised: bool = False,
        joined: bool = False,
    ) -> "LoraGroup":
        """Stacks projections of one input; a single weight that is not joined and quantised weights are not copied.

        Args:
            dequantised: whether quantised weights are dequantised now, once for all passes; those without an identity
                never are.
            joined: whether weights and adapters are multiplied together, where our kernels can.

        Raises:
            ValueError: their ranks or scalings differ.
        """
        weights, biases, loras_A, loras_B, scalings = zip(*projections, strict=True)
        if len({lora_A.shape[0] for lora_A in loras_A}) > 1 or len(set(scalings)) > 1:
            raise ValueError("Projections of different ranks or scalings cannot be stacked.")
        columns, rank, dtype = tuple(map(len, loras_B)), len(loras_A[0]), weights[0].dtype
        is_quantised = isinstance(weights[0], QuantisedWeight)
        weight, one_matrix = _stack_weights(weights, columns, loras_A[0], dequantised, joined)
        if isinstance(one_matrix, JoinedWeight):
            stacked_A = one_matrix.stacked_A
        else:
            stacked_A = torch.cat([lora_A.detach() for lora_A in loras_A]).to(dtype)
        stacked_B = torch.cat([lora_B.detach() for lora_B in loras_B]).to(dtype)
        packed = _alike_in_4_bits(weights) if joined and weight is weights else None
        if packed is not None and FourBitsWithAdapters.can_hold(packed, rank):
            one_matrix = FourBitsWithAdapters(packed, stacked_A, stacked_B, columns, scalings[0])
        bias = None
        if any(b is not None for b in biases):
            parts = zip(loras_B, biases, strict=True)
            bias = torch.cat([stacked_B.new_zeros(len(lora_B)) if b is None else b.detach() for lora_B, b in parts])
        group = cls(
            weight, bias, loras_A, loras_B, stacked_A, stacked_B, scalings[0], is_quantised, one_matrix, scratch
        )
        if isinstance(one_matrix, JoinedWeight | BesideFp8):
            group.refresh()
        if scratch is not None and is_quantised:
            scratch.reserve(max(columns) * stacked_A.shape[1])
        return group

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """M_1 .. M_n."""
        return tuple(lora_B.shape[0] for lora_B in self.loras_B)

    def matrices(self) -> Iterator[tuple[slice, Tensor]]:
        """Outputs and their W, [M, K].

        Quantised weights come as many projections at a time as the scratch buffer holds, each valid until the next;
        those that are dequantised already come in the same parts, so that products have the same bits.
        """
        if not self.is_quantised:
            yield slice(None), self.weight
            return
        scratch, num_inputs, begin = self.scratch or ScratchBuffer(), self.stacked_A.shape[1], 0
        for together in self._parts:
            columns = self.columns[together]
            outputs = slice(begin, begin + sum(columns))
            if isinstance(self.weight, Tensor):
                matrix = self.weight[outputs]
            else:
                matrix = scratch.matrix_like(sum(columns), num_inputs, self.stacked_A)
                dequantise(self.weight[together], matrix.split(columns))
            yield outputs, matrix
            begin = outputs.stop

    @functools.cached_property
    def _parts(self) -> list[slice]:
        """Which projections fit into the scratch buffer together."""
        parts, ends = [], [0, *accumulate(self.columns)]
        most = 0 if self.scratch is None else self.scratch.size // self.stacked_A.shape[1]
        for number in range(len(self.columns)):
            if parts and ends[number + 1] - ends[parts[-1].start] <= most:
                parts[-1] = slice(parts[-1].start, number + 1)
            else:
                parts.append(slice(number, number + 1))
        return parts

    def few_rows_in_4_bits(self, rows: Tensor) -> list[FourBits] | None:
        """The weights in 4 bits if these rows, of X or of dY, are multiplied by them as they are; else None."""
        if not self.is_quantised or isinstance(self.weight, Tensor) or len(rows) > FEW_ROWS:
            return None
        # fp32 would not be multiplied by tensor cores.
        if rows.dtype.itemsize != 2 or not backend.runs_kernels(rows) or not _has_tensor_cores(rows.device):
            return None
        packed = _alike_in_4_bits(self.weight)
        chunk = backend.kernels("four_bit_products").CHUNK
        # Chunks may not reach beyond a row or a block.
        fits = packed is not None and self.stacked_A.shape[1] % chunk == 0 and packed[0].block % chunk == 0
        # Chunks are read 16 bytes at a time.
        return packed if fits and all(each.packed.data_ptr() % 16 == 0 for each in packed) else None

    @property
    def in_fp8(self) -> Fp8Weight | None:
        """The stacked weights if they are in FP8."""
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def begin(self, x_NK: Tensor, unfinished: list[Tensor]) -> tuple[Tensor, Tensor]:
        """All outputs side by side, [N, M], and D, [N, n R].

        If the outputs lack X Wᵀ, which `finish` then adds, appends them and D to `unfinished`.
        """
        if isinstance(joined := self.joined_for(x_NK), JoinedWeight | FourBitsWithAdapters):
            return backend.kernels("joined_lora").add_lora(
                *joined.multiply(x_NK), self.stacked_B, self.bias, self.columns, self.scaling
            )
        out_NM, down_NR = self._apply_adapters(x_NK)
        # `.data`: completing the forward pass must not bump autograd's version.
        unfinished += out_NM.data, down_NR
        return out_NM, down_NR

    def _apply_adapters(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The adapters' part of all outputs side by side, with the bias, [N, M]; and D, [N, n R].

        For weights in FP8 `finish` writes that part too, and the outputs have no values yet.
        """
        down_NR = x_NK @ self.stacked_A.T
        if self.in_fp8:
            return x_NK.new_empty(len(x_NK), len(self.stacked_B)), down_NR
        return backend.implementation(down_NR, "lora").lora_up(
            down_NR, self.stacked_B, self.bias, self.columns, self.scaling
        ), down_NR

    @torch.no_grad()
    def finish(self, x: Tensor, unfinished: list[Tensor], x_in_fp8: Fp8Rows | None = None) -> None:
        """Adds X Wᵀ to outputs that `begin` left without it, after all that is kept for the backward pass.

        So a checkpointed block (`torch.utils.checkpoint`), which stops recomputing once it has what it keeps, skips the
        product with its last layer's weight.
        """
        if not unfinished:
            return
        x_NK, (out_NM, down_NR) = x.reshape(-1, x.shape[-1]), unfinished
        if self.in_fp8:
            small = down_NR, self.stacked_B, self.bias, self.columns, self.scaling
            self.in_fp8.outputs_(out_NM, x_NK, small, x_in_fp8)
            return
        if (packed := self.few_rows_in_4_bits(x_NK)) is not None:
            backend.kernels("four_bit_products").add_outputs_(out_NM, x_NK, packed, self.columns)
            return
        for outputs, matrix in self.matrices():
            backend.implementation(out_NM, "gemm").add_product_(out_NM[:, outputs], x_NK, matrix.T)

    def copies(self) -> list[TensorCopy]:
        """The copies of the trained tensors, so that those of many groups can be made at once."""
        pairs = [*zip(self.loras_A, self.stacked_A.split(self.loras_A[0].shape[0]), strict=True)]
        pairs += zip(self.loras_B, self.stacked_B.split(self.columns), strict=True)
        copies = [TensorCopy(source.detach(), destination) for source, destination in pairs]
        if isinstance(self.joined, JoinedWeight | BesideFp8):
            sides = zip(self.loras_B, self.joined.beside, strict=True)
            copies += [TensorCopy(lora_B.detach(), beside, self.scaling) for lora_B, beside in sides]
        return copies

    @property
    def place(self) -> Tensor | None:
        """The address of the gradients, int64 [1], for kernels that add to them; None if autograd gets them."""
        pairs = zip(self.loras_A, self.loras_B, strict=True)
        grads = [getattr(lora, "main_grad", None) for pair in pairs for lora in pair]
        if any(grad is None or grad.dtype != torch.float32 for grad in grads):
            return None
        begin, *others = (grad.data_ptr() for grad in grads)
        ends = accumulate((grad.nbytes for grad in grads[:-1]), initial=begin)
        if begin % 16 or [begin, *others] != list(ends):
            return None
        if begin not in self._places:
            # A captured graph reads it, so it is made in the warm-up and kept.
            self._places[begin] = torch.tensor([begin], device=self.stacked_A.device)
        return self._places[begin]

    def refresh(self) -> None:
        """Copies the trained tensors again; call it whenever they may have changed."""
        copy_all(self.copies())

    def split(
        self, dstacked_A: Tensor | None, dstacked_B: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        """The gradients of all lora_A, then of all lora_B; None of those that are added already."""
        dloras_A = dloras_B = len(self.loras_A) * (None,)
        if dstacked_A is not None:
            dloras_A = dstacked_A.to(dtype).chunk(len(self.loras_A))
        if dstacked_B is not None:
            dloras_B = dstacked_B.to(dtype).split(self.columns)
        return *dloras_A, *dloras_B

    def joined_for(self, rows: Tensor) -> JoinedWeight | BesideFp8 | FourBitsWithAdapters | None:
        """The joined weight if these rows, of X or of dY, are multiplied by it."""
        if isinstance(self.joined, FourBitsWithAdapters):
            suits = len(rows) > 0 and self.few_rows_in_4_bits(rows) is not None
        else:
            suits = self.joined is not None and self.joined.suits(rows)
        return self.joined if suits else None


def _stack_weights(
    weights: tuple, columns: tuple[int, ...], lora_A: Tensor, dequantised: bool, joined: bool
) -> tuple[Tensor | Fp8Weight | tuple[QuantisedWeight, ...], JoinedWeight | BesideFp8 | None]:
    """The weights as `LoraGroup` has them, and the matrix that joins them with the adapters, if there is one."""
    rank, num_inputs = lora_A.shape
    if isinstance(weights[0], Fp8Weight):
        stacked = Fp8Weight.stack(weights)
        can_join = joined and BesideFp8.can_hold(weights, rank)
        return stacked, BesideFp8.of(stacked, list(columns), rank) if can_join else None
    kept = None
    if isinstance(weights[0], QuantisedWeight):
        if not dequantised or None in (weight.identity for weight in weights):
            return weights, None
        kept = torch.empty(sum(columns), num_inputs, dtype=weights[0].dtype, device=lora_A.device)
        dequantise(weights, kept.split(columns))
        weights = kept.split(columns)
    if joined and JoinedWeight.can_hold(weights, rank):
        one_matrix = JoinedWeight.of(weights, rank)
        return one_matrix.weight, one_matrix
    if kept is not None:
        return kept, None
    return torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach(), None


def dequantise(weights: Sequence[QuantisedWeight], parts: Sequence[Tensor]) -> None:
    """Writes each weight into its matrix [M_i, K], contiguous; all in one launch if our kernels can read them."""
    packed = _alike_in_4_bits(weights)
    if packed is not None and backend.runs_kernels(parts[0]):
        backend.kernels("four_bits").dequantise(packed, parts)
        return
    for weight, part in zip(weights, parts, strict=True):
        weight.dequantise(part)


def _alike_in_4_bits(weights: Sequence[QuantisedWeight]) -> list[FourBits] | None:
    """The weights in 4 bits; None if our kernels cannot read all of them in one launch."""
    packed = [weight.four_bits for weight in weights]
    blocks = {each and (each.block, each.of_scales and each.of_scales.block) for each in packed}
    return packed if len(blocks) == 1 and None not in blocks else None


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU's tensor cores multiply bf16, as all do since Ampere."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
