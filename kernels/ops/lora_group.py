"""Projections of one input with their LoRA adapters, as `lora_linear` multiplies them; see there for the shapes."""

import functools
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend
from .copies import TensorCopy, copy_all
from .frozen_weights import Matrices, alike_in_4_bits, dequantise, is_streamed, side_by_side
from .joined_weight import FourBitsWithAdapters, JoinedWeight
from .quantised import QuantisedWeight, ScratchBuffer


class LoraProjection(NamedTuple):
    """One projection: frozen weight [M, K] and bias [M] or None, lora_A [R, K], lora_B [M, R], and its scaling.

    Weights with the attribute `is_streamed` are not copied; those that are stacked must lie side by side.
    """

    weight: Tensor | QuantisedWeight
    bias: Tensor | None
    lora_A: Tensor
    lora_B: Tensor
    scaling: float


@dataclass(frozen=True)
class LoraGroup:
    """Projections of one input, stacked. Trained tensors stay where they are; products use copies of them.

    Attributes:
        weight: the frozen weights, which multiply rows.
        bias: [M], or None.
        loras_A, loras_B: each projection's trained [R, K] and [M_i, R], of any floating dtype, usually fp32.
        stacked_A, stacked_B: copies of them, [n R, K] and [M, R], in the weight's dtype.
        scaling: s, the same for all.
        joined: the weight and the copies of the adapters in one matrix, if they are; 4 bits have another form.

    If each trained tensor has a `main_grad` (as in Megatron-LM), fp32, and they lie one after another, A before B, then
    the kernels of a joined weight add gradients there, and autograd gets none.
    """

    weight: Matrices
    bias: Tensor | None
    loras_A: tuple[Tensor, ...]
    loras_B: tuple[Tensor, ...]
    stacked_A: Tensor
    stacked_B: Tensor
    scaling: float
    joined: JoinedWeight | FourBitsWithAdapters | None = None
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
        stacked, one_matrix = _stack_weights(weights, columns, loras_A[0], dequantised, joined)
        if one_matrix is not None:
            stacked_A = one_matrix.stacked_A
        else:
            stacked_A = torch.cat([lora_A.detach() for lora_A in loras_A]).to(dtype)
        stacked_B = torch.cat([lora_B.detach() for lora_B in loras_B]).to(dtype)
        packed = alike_in_4_bits(weights) if joined and stacked is None else None
        if packed is not None and FourBitsWithAdapters.can_hold(packed, rank):
            one_matrix = FourBitsWithAdapters(packed, stacked_A, stacked_B, columns, scalings[0])
        bias = None
        if any(b is not None for b in biases):
            parts = zip(loras_B, biases, strict=True)
            bias = torch.cat([stacked_B.new_zeros(len(lora_B)) if b is None else b.detach() for lora_B, b in parts])
        weight = Matrices(stacked, weights if is_quantised else None, columns, stacked_A, scratch)
        group = cls(weight, bias, loras_A, loras_B, stacked_A, stacked_B, scalings[0], one_matrix)
        if isinstance(one_matrix, JoinedWeight):
            group.refresh()
        if scratch is not None and is_quantised:
            scratch.reserve(max(columns) * stacked_A.shape[1])
        return group

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """M_1 .. M_n."""
        return tuple(lora_B.shape[0] for lora_B in self.loras_B)

    def begin(self, x_NK: Tensor, unfinished: list[Tensor]) -> tuple[Tensor, Tensor]:
        """All outputs side by side, [N, M], and D, [N, n R].

        If the outputs lack X Wᵀ, which `finish` then adds, appends them to `unfinished`.
        """
        if (joined := self.joined_for(x_NK)) is not None:
            return backend.kernels("joined_lora").add_lora(
                *joined.multiply(x_NK), self.stacked_B, self.bias, self.columns, self.scaling
            )
        down_NR = x_NK @ self.stacked_A.T
        out_NM = backend.implementation(down_NR, "lora").lora_up(
            down_NR, self.stacked_B, self.bias, self.columns, self.scaling
        )
        # `.data`: completing the forward pass must not bump autograd's version.
        unfinished.append(out_NM.data)
        return out_NM, down_NR

    @torch.no_grad()
    def finish(self, x: Tensor, unfinished: list[Tensor]) -> None:
        """Adds X Wᵀ to outputs that `begin` left without it, after all that is kept for the backward pass.

        So a checkpointed block (`torch.utils.checkpoint`), which stops recomputing once it has what it keeps, skips the
        product with its last layer's weight.
        """
        for out_NM in unfinished:
            self.weight.outputs_(out_NM, x.reshape(-1, x.shape[-1]))

    def copies(self) -> list[TensorCopy]:
        """The copies of the trained tensors, so that those of many groups can be made at once."""
        pairs = [*zip(self.loras_A, self.stacked_A.split(self.loras_A[0].shape[0]), strict=True)]
        pairs += zip(self.loras_B, self.stacked_B.split(self.columns), strict=True)
        copies = [TensorCopy(source.detach(), destination) for source, destination in pairs]
        if isinstance(self.joined, JoinedWeight):
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

    def joined_for(self, rows: Tensor) -> JoinedWeight | FourBitsWithAdapters | None:
        """The joined weight if these rows, of X or of dY, are multiplied by it."""
        return self.joined if self.joined is not None and self.joined.suits(rows) else None


def _stack_weights(
    weights: tuple, columns: tuple[int, ...], lora_A: Tensor, dequantised: bool, joined: bool
) -> tuple[Tensor | None, JoinedWeight | None]:
    """The weights stacked, or None if each pass dequantises them; and the matrix that joins them, if any."""
    rank, num_inputs = lora_A.shape
    kept = None
    if isinstance(weights[0], QuantisedWeight):
        if not dequantised or None in (weight.identity for weight in weights):
            return None, None
        kept = torch.empty(sum(columns), num_inputs, dtype=weights[0].dtype, device=lora_A.device)
        dequantise(weights, kept.split(columns))
        weights = kept.split(columns)
    if is_streamed(weights[0]):
        return side_by_side(weights), None
    if joined and JoinedWeight.can_hold(weights, rank):
        one_matrix = JoinedWeight.of(weights, rank)
        return one_matrix.weight, one_matrix
    if kept is not None:
        return kept, None
    return torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach(), None
