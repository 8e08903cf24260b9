"""Linear layers with LoRA adapters: all projections that read the same X, as one wide layer.

    forward    [Y_1 .. Y_n] = X Wᵀ + b + s [D_1 B_1ᵀ .. D_n B_nᵀ]        D = X Aᵀ: A_1 .. A_n stacked, as W and b are
    backward   U_i = s dY_i B_i                                          over the active rows only, as all that follows
               dB_i = s dY_iᵀ D_i
               dA = Uᵀ X
               dX = U A + dY W                                           zero on all other rows

One pass over dY gives U and dB. Each sum starts with its small product and accumulates the large one onto it, so the
full-size terms of a layer-by-layer evaluation are never written (Hu et al. 2021 for the adapter; Topchii et al.,
equations 1 and 2, for the rows). W and b are frozen; quantised weights are dequantised once per pass, a few at a time,
or once for all passes, with the same products; few rows are multiplied by weights in 4 bits as they are. Where a weight
is joined with its adapters (`joined_weight`), its products have the small ones beside them, and come first. X is kept
for dA, unless it can be recomputed (Chen et al. 2016).

Several adapters may lie side by side on the same weights. Each then owns some rows, whose outputs and gradients are
those of it alone, whatever the numbers of the others: one pass reads the weights for all.

Shapes: N rows, A active rows, K inputs, M_i outputs of n projections, M their sum, R rank of each.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend, choices
from .copies import Copy, copy_all
from .fp8 import Fp8Weight
from .joined_weight import BesideFp8, FourBitsWithAdapters, JoinedWeight
from .move_rows import RowTarget, keep_rows, put, take, take_kept
from .quantised import FourBits, Fp8Rows, QuantisedWeight, ScratchBuffer
from .rows import KnownRows, Rows, as_rows, has_unknown_count, rows_of
from .tiles import Tiles

# Up to here a product is bound by reading the weight. More rows share the cost of dequantising it.
FEW_ROWS = 128


class Recompute(NamedTuple):
    """Recomputes a tensor: `function(*tensors)` has the same bits. The tensors are detached, and kept anyway.

    The tensor may be known in FP8, too.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    in_fp8: Fp8Rows | None = None


class LoraProjection(NamedTuple):
    """One projection: frozen weight [M, K] and bias [M] or None, lora_A [R, K], lora_B [M, R], and its scaling."""

    weight: Tensor | QuantisedWeight | Fp8Weight
    bias: Tensor | None
    lora_A: Tensor
    lora_B: Tensor
    scaling: float


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


@dataclass(frozen=True)
class LoraGroup:
    """Projections of one input, stacked. Trained tensors stay where they are; products use copies of them.

    Attributes:
        weight: [M, K], the frozen weights stacked, in FP8 too; or each quantised weight, dequantised in each pass.
        bias: [M], or None.
        loras_A, loras_B: each projection's trained [R, K] and [M_i, R], of any floating dtype, usually fp32; those of
            the second adapter follow those of the first.
        stacked_A, stacked_B: copies of them, [n R, K] and [M, R] of each adapter, in the weight's dtype.
        scaling: s, the same for all.
        is_quantised: whether the weights are quantised, be they dequantised already or not.
        joined: the weight and the copies of the adapters in one matrix, if they are; FP8 and 4 bits have other forms.
        scratch: where quantised weights are dequantised; None for a new matrix each time.
        num_adapters: how many adapters lie side by side.

    If each trained tensor has a `main_grad` (as in Megatron-LM), fp32, and those of an adapter lie one after another, A
    before B, then the kernels of a joined weight add gradients there, and autograd gets none. If
    `overwrite_main_grad` (as in Transformer Engine) is true, they replace what is there.
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
    num_adapters: int = 1
    _places: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def stack(
        cls,
        projections: list[LoraProjection],
        scratch: ScratchBuffer | None = None,
        *,
        dequantised: bool = False,
        joined: bool = False,
        num_adapters: int = 1,
    ) -> "LoraGroup":
        """Stacks projections of one input; a single weight that is not joined and quantised weights are not copied.

        Args:
            projections: those with the first adapter; then those with the next one, on the same weights.
            dequantised: whether quantised weights are dequantised now, once for all passes; those without an identity
                never are.
            joined: whether weights and adapters are multiplied together, where our kernels can.
            num_adapters: how many adapters lie side by side.

        Raises:
            ValueError: their ranks or scalings differ; or several adapters are not on the same weights, or these are
                quantised.
        """
        weights, biases, loras_A, loras_B, scalings = zip(*projections, strict=True)
        if len({lora_A.shape[0] for lora_A in loras_A}) > 1 or len(set(scalings)) > 1:
            raise ValueError("Projections of different ranks or scalings cannot be stacked.")
        if num_adapters > 1:
            _refuse_different_weights(weights, num_adapters)
            number = len(projections) // num_adapters
            weights, biases = weights[:number], biases[:number]
        weight, dtype, one_matrix = weights, weights[0].dtype, None
        is_quantised, rank = isinstance(weights[0], QuantisedWeight), len(loras_A[0])
        if is_quantised and dequantised and None not in (w.identity for w in weights):
            sizes = [lora_B.shape[0] for lora_B in loras_B]
            weight = torch.empty(sum(sizes), loras_A[0].shape[1], dtype=dtype, device=loras_A[0].device)
            matrices = weight.split(sizes)
            dequantise(weights, matrices)
        else:
            matrices = weights
        if isinstance(weights[0], Fp8Weight):
            weight = Fp8Weight.stack(weights)
            if joined and BesideFp8.can_hold(weights, rank):
                one_matrix = BesideFp8.of(weight, [len(lora_B) for lora_B in loras_B], rank)
        elif joined and JoinedWeight.can_hold(matrices, rank):
            one_matrix = JoinedWeight.of(matrices, rank, num_adapters)
            weight = one_matrix.weight
        elif not is_quantised:
            weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        if isinstance(one_matrix, JoinedWeight):
            stacked_A = one_matrix.stacked_A
        else:
            stacked_A = torch.cat([lora_A.detach() for lora_A in loras_A]).to(dtype)
        stacked_B = torch.cat([lora_B.detach() for lora_B in loras_B]).to(dtype)
        packed = _alike_in_4_bits(weights) if joined and is_quantised and weight is weights else None
        if packed is not None and FourBitsWithAdapters.can_hold(packed, rank):
            columns = tuple(len(lora_B) for lora_B in loras_B)
            one_matrix = FourBitsWithAdapters(packed, stacked_A, stacked_B, columns, scalings[0])
        bias = None
        if any(b is not None for b in biases):
            parts = zip(loras_B, biases, strict=False)
            bias = torch.cat([stacked_B.new_zeros(len(lora_B)) if b is None else b.detach() for lora_B, b in parts])
        common = scalings[0], is_quantised, one_matrix, scratch
        group = cls(weight, bias, loras_A, loras_B, stacked_A, stacked_B, *common, num_adapters)
        if isinstance(one_matrix, JoinedWeight | BesideFp8):
            group.refresh()
        if scratch is not None and is_quantised:
            scratch.reserve(max(group.columns) * stacked_A.shape[1])
        return group

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """M_1 .. M_n."""
        return tuple(lora_B.shape[0] for lora_B in self.loras_B[: len(self.loras_B) // self.num_adapters])

    @functools.cached_property
    def alone(self) -> list["LoraGroup"]:
        """Each of the adapters that lie side by side, alone on the same weights."""
        number = self.num_adapters
        stacked = zip(self.stacked_A.chunk(number), self.stacked_B.chunk(number), strict=True)
        loras = list(zip(self.loras_A, self.loras_B, strict=True))
        groups = []
        for begin, (stacked_A, stacked_B) in zip(range(0, len(loras), len(self.columns)), stacked, strict=True):
            loras_A, loras_B = zip(*loras[begin:][: len(self.columns)], strict=True)
            groups.append(
                replace(
                    self,
                    loras_A=loras_A,
                    loras_B=loras_B,
                    stacked_A=stacked_A,
                    stacked_B=stacked_B,
                    joined=None,
                    num_adapters=1,
                )
            )
        return groups

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

    def begin(self, x_NK: Tensor, unfinished: list[Tensor], cu_owned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All outputs side by side, [N, M], and D, [N, n R].

        If the outputs lack X Wᵀ, which `add_product` then adds, appends its arguments to `unfinished`.
        """
        if isinstance(joined := self.joined_for(x_NK), JoinedWeight | FourBitsWithAdapters):
            beside = (joined.sides, 1.0) if self.num_adapters > 1 else (self.stacked_B, self.scaling)
            rest = beside[0], self.bias, self.columns, beside[1]
            return backend.kernels("joined_lora").add_lora(*joined.multiply(x_NK), *rest, cu_owned)
        out_NM, down_NR = self._apply_adapters(x_NK)
        # `.data`: completing the forward pass must not bump autograd's version.
        unfinished += out_NM.data, down_NR
        return out_NM, down_NR

    def _apply_adapters(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The adapters' part of all outputs side by side, with the bias, [N, M]; and D, [N, n R].

        For weights in FP8, and few rows and weights in 4 bits, `add_product` writes that part too, and the outputs have
        no values yet.
        """
        down_NR = x_NK @ self.stacked_A.T
        if self.in_fp8 or self.few_rows_in_4_bits(x_NK) is not None:
            return x_NK.new_empty(len(x_NK), len(self.stacked_B)), down_NR
        return backend.implementation(down_NR, "lora").lora_up(
            down_NR, self.stacked_B, self.bias, self.columns, self.scaling
        ), down_NR

    @torch.no_grad()
    def add_product(self, x: Tensor, out_NM: Tensor, down_NR: Tensor, x_in_fp8: Fp8Rows | None = None) -> None:
        """Adds X Wᵀ to what `begin` gave, after all that is kept for the backward pass.

        So a checkpointed block (`torch.utils.checkpoint`), which stops recomputing once it has what it keeps, skips the
        product with its last layer's weight.
        """
        x_NK = x.reshape(-1, x.shape[-1])
        small = down_NR, self.stacked_B, self.bias
        if self.in_fp8:
            self.in_fp8.outputs_(out_NM, x_NK, (*small, self.columns, self.scaling), x_in_fp8)
            return
        if (packed := self.few_rows_in_4_bits(x_NK)) is not None:
            backend.kernels("four_bit_products").outputs(out_NM, x_NK, packed, self.columns, *small, self.scaling)
            return
        for outputs, matrix in self.matrices():
            backend.implementation(out_NM, "gemm").add_product_(out_NM[:, outputs], x_NK, matrix.T)

    def copies(self) -> list[Copy]:
        """The copies of the trained tensors, so that those of many groups can be made at once."""
        pairs = [*zip(self.loras_A, self.stacked_A.split(self.loras_A[0].shape[0]), strict=True)]
        if self.joined is None or self.num_adapters == 1:  # several need only what lies beside a joined weight
            pairs += zip(self.loras_B, self.stacked_B.split(self.num_adapters * self.columns), strict=True)
        copies = [Copy(source.detach(), destination) for source, destination in pairs]
        if isinstance(self.joined, JoinedWeight | BesideFp8):
            sides = zip(self.loras_B, self.joined.beside, strict=True)
            copies += [Copy(lora_B.detach(), beside, self.scaling) for lora_B, beside in sides]
        return copies

    @property
    def places(self) -> tuple[Tensor, bool] | None:
        """Where each adapter's gradients are, int64 [n], and whether to add to them; None if autograd gets them."""
        number, addresses = len(self.columns), []
        for begin in range(0, len(self.loras_A), number):
            pairs = zip(self.loras_A[begin:][:number], self.loras_B[begin:][:number], strict=True)
            grads = [getattr(lora, "main_grad", None) for pair in pairs for lora in pair]
            if any(grad is None or grad.dtype != torch.float32 for grad in grads):
                return None
            begins = [grad.data_ptr() for grad in grads]
            if begins[0] % 16 or begins[1:] != [at + grad.nbytes for at, grad in zip(begins, grads, strict=True)][:-1]:
                return None
            addresses.append(begins[0])
        if tuple(addresses) not in self._places:
            # A captured graph reads it, so it is made in the warm-up and kept.
            self._places[tuple(addresses)] = torch.tensor(addresses, device=self.stacked_A.device)
        return self._places[tuple(addresses)], not getattr(self.loras_A[0], "overwrite_main_grad", False)

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
            dloras_B = dstacked_B.to(dtype).split(self.num_adapters * self.columns)
        return *dloras_A, *dloras_B

    def joined_for(self, rows: Tensor) -> JoinedWeight | BesideFp8 | FourBitsWithAdapters | None:
        """The joined weight if these rows, of X or of dY, are multiplied by it."""
        if isinstance(self.joined, FourBitsWithAdapters):
            suits = len(rows) > 0 and self.few_rows_in_4_bits(rows) is not None
        else:
            suits = self.joined is not None and self.joined.suits(rows)
        return self.joined if suits else None


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group, recompute, cu_owned, unfinished, *adapters):
        """The outputs, as `LoraGroup.begin` computes them."""
        x_NK = x.reshape(-1, x.shape[-1])
        out_NM, down_NR = group.begin(x_NK, unfinished, cu_owned)
        kept = (keep_rows(x_NK, rows),) if recompute is None else recompute.tensors
        # The adapters themselves, so that autograd notices if they change before the backward pass.
        ctx.save_for_backward(keep_rows(down_NR, rows), *adapters, *kept)
        ctx.rows, ctx.x_shape, ctx.group, ctx.cu_owned = rows, x.shape, group, cu_owned
        ctx.function = None if recompute is None else recompute.function
        outs = out_NM.view(*x.shape[:-1], out_NM.shape[1]).split(group.columns, dim=-1)
        return tuple(out.data for out in outs)  # views could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        group, num_in = ctx.group, ctx.x_shape[-1]
        kept_down, *adapters_and_kept = ctx.saved_tensors
        dtype, kept = adapters_and_kept[0].dtype, adapters_and_kept[2 * len(group.loras_A) :]
        douts = [dout.reshape(-1, dout.shape[-1]) for dout in douts]
        num_rows, rows, tiles = len(douts[0]), rows_of(ctx.rows, *douts), None
        if has_unknown_count(rows):
            tiles = _tiles_for_unknown_count(douts[0])
            # Without kernels, read the count on the host and trim the rows.
            rows = rows.on_host() if tiles is None else rows
        if tiles is None:
            dout_AM = _concatenate_columns([take(dout_NM, rows, weighted=True) for dout_NM in douts])
        else:
            # At full capacity: rows beyond the count are zeros, which change no sum of rank R.
            dout_NM = _concatenate_columns(douts)
            dout_AM = take(dout_NM, rows, weighted=True)
        down_AR = take_kept(kept_down, rows, num_rows)
        # With several adapters, only the joined weight has kernels.
        takes_joined = rows is None and (ctx.needs_input_grad[0] or group.num_adapters > 1)
        if takes_joined and (joined := group.joined_for(dout_AM)) is not None:
            products = joined.multiply_backward(dout_AM)
            x_NK = (kept[0] if ctx.function is None else ctx.function(*kept)).reshape(-1, num_in)
            small = dout_AM, x_NK, down_AR, group.stacked_A, group.columns, group.scaling
            given = *products, *small, ctx.cu_owned, group.places
            dx, dstacked_A, dstacked_B = backend.kernels("joined_lora").joined_backward(*given)
            return dx.reshape(ctx.x_shape), *5 * (None,), *group.split(dstacked_A, dstacked_B, dtype)
        up_AR, dstacked_B = backend.implementation(dout_AM, "lora").lora_up_backward(
            dout_AM, down_AR, group.stacked_B, group.columns, group.scaling
        )
        kept_x = kept[0] if ctx.function is None else ctx.function(*kept).reshape(-1, num_in)
        dstacked_A = _product(up_AR.T, take_kept(kept_x, rows, num_rows), dtype)
        del kept_x  # frees it before dX is computed
        dx = None
        if ctx.needs_input_grad[0]:
            if group.in_fp8:
                dx = group.in_fp8.inputs(dout_AM, up_AR, group.stacked_A)
                dx = dx if rows is None else put(dx, rows, num_rows)
            elif (packed := group.few_rows_in_4_bits(dout_AM)) is not None:
                products = backend.kernels("four_bit_products")
                dx = products.inputs(dout_AM, packed, group.columns, num_in, up_AR, group.stacked_A)
                dx = dx if rows is None else put(dx, rows, num_rows)
            elif tiles is None:
                dx = _dx_of_compact_rows(dout_AM, up_AR, group, rows, num_rows)
            else:
                dx_parts = (
                    backend.kernels("products").dx(dout_NM[:, outputs], w, rows, tiles)
                    for outputs, w in group.matrices()
                )
                dx = functools.reduce(Tensor.add_, dx_parts)
                dx.addmm_(put(up_AR, rows, num_rows), group.stacked_A)
            dx = dx.reshape(ctx.x_shape)
        return dx, *5 * (None,), *group.split(dstacked_A, dstacked_B, dtype)


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU's tensor cores multiply bf16, as all do since Ampere."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _tiles_for_unknown_count(dout_NM: Tensor) -> Tiles | None:
    """Tiles of dX for rows whose number only the device knows; None where our kernels do not run."""
    if not backend.runs_kernels(dout_NM):
        return None
    return choices.choose_for_unknown_count(dout_NM.dtype.itemsize, dout_NM.device).dx


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A B in `dtype`; a GPU does not round it to the factors' dtype first."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a @ b).to(dtype)


def _dx_of_compact_rows(dout_AM: Tensor, up_AR: Tensor, group: LoraGroup, rows: KnownRows, num_rows: int) -> Tensor:
    target = RowTarget(rows, num_rows, group.stacked_A.shape[1], dout_AM)
    torch.mm(up_AR, group.stacked_A, out=target.part)
    for outputs, matrix in group.matrices():
        backend.implementation(dout_AM, "gemm").add_product_(target.part, dout_AM[:, outputs], matrix)
    return target.whole()


def _concatenate_columns(parts_AM: list[Tensor]) -> Tensor:
    """Matrices as one, [A, M]; not copied if they lie side by side already."""
    first, num_columns = parts_AM[0], sum(part.shape[1] for part in parts_AM)
    offset = first.storage_offset()
    for part in parts_AM:
        same_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or part.storage_offset() != offset or part.stride() != (first.stride(0), 1):
            return torch.cat(parts_AM, dim=1)
        offset += part.shape[1]
    if len(parts_AM) == 1 or first.stride(0) < num_columns:
        return first if len(parts_AM) == 1 else torch.cat(parts_AM, dim=1)
    return first.as_strided((len(first), num_columns), (first.stride(0), 1))


def _refuse_different_weights(weights: Sequence, num_adapters: int) -> None:
    number, rest = divmod(len(weights), num_adapters)
    if rest or any(weight is not weights[place % number] for place, weight in enumerate(weights)):
        raise ValueError(f"{num_adapters} adapters side by side must be on the same weights, in the same order.")
    if not isinstance(weights[0], Tensor):
        raise ValueError("Adapters side by side need weights that are not quantised.")


def refuse_other_owners(group: LoraGroup, cu_owned: Tensor | None, rows: Rows | None = None) -> None:
    """Raises a ValueError if rows have owners that a group does not have, or the other way round."""
    if cu_owned is None or group.num_adapters == 1:
        raise ValueError("Rows have owners if several adapters lie side by side, and only then.")
    if rows is not None:
        raise ValueError("Rows with owners are all active; leave out the active rows.")
    if cu_owned.dtype != torch.int32 or cu_owned.shape != (group.num_adapters + 1,):
        raise ValueError(
            f"The rows of {group.num_adapters} adapters begin at int32 [{group.num_adapters + 1}], not at "
            f"{cu_owned.dtype} {[*cu_owned.shape]}."
        )


def each_alone(
    x: Tensor, group: LoraGroup, cu_owned: Tensor, run: Callable[[slice, LoraGroup], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The outputs that `run` gives for the rows of each adapter alone; the last one gets the filler, too."""
    ends, num_rows = cu_owned.tolist(), x.shape[:-1].numel()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > num_rows:
        raise ValueError(f"The rows of adapters must lie one after another from 0 to {num_rows}, but begin at {ends}.")
    rows_of_each = map(slice, ends[:-1], [*ends[1:-1], num_rows])
    parts = [run(rows, alone) for rows, alone in zip(rows_of_each, group.alone, strict=True)]
    outs = map(torch.cat, zip(*parts, strict=True))
    return tuple(out.view(*x.shape[:-1], out.shape[1]) for out in outs)


def lora_linear(
    x: Tensor,
    group: LoraGroup,
    rows: Rows | None = None,
    recompute: Recompute | None = None,
    cu_owned: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of all projections of `x`, with gradients for `x` and the adapters.

    Args:
        x: [..., K] in the weight's dtype; its leading dimensions are the rows, flattened in order.
        group: the projections. Products run in x's dtype with its copies of the adapters, which must be up to date; the
            adapters' gradients come in the adapters' own dtype.
        rows: the only rows whose output gradients may be non-zero: int64 [A], increasing; the same as `ActiveRows`; a
            slice; a function that chooses them in the backward pass (`detect`: those that are non-zero in any of them),
            whose number the host does not wait for if kernels run; None for all.
        recompute: recomputes x in the backward pass, so that x is not kept. None keeps its active rows.
        cu_owned: int32 [number of adapters + 1], if several lie side by side: where the rows of each begin, and where
            those of the last end. What follows is filler, which has no gradient. All rows are active then.

    Returns:
        One [..., M_i] in x's dtype for each projection, side by side in memory. First-order gradients only.

    Raises:
        ValueError: the owners do not fit the rows or the adapters, or are given with active rows.
    """
    if cu_owned is not None or group.num_adapters > 1:
        refuse_other_owners(group, cu_owned, rows)
        if group.joined_for(x_NK := x.reshape(-1, x.shape[-1])) is None:
            return each_alone(x, group, cu_owned, lambda rows, alone: lora_linear(x_NK[rows], alone))
    rows = as_rows(rows, x.shape[:-1].numel())
    unfinished: list[Tensor] = []
    given = x, rows, group, recompute, cu_owned, unfinished
    outputs = _LoraLinear.apply(*given, *group.loras_A, *group.loras_B)
    if unfinished:
        group.add_product(x, *unfinished, None if recompute is None else recompute.in_fp8)
    return outputs
