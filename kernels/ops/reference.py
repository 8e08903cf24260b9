"""Each op in plain PyTorch: the specification of our kernels, and the implementation wherever they do not run.

Kernels of the same name are in `gpu/`; where their results differ, the docstrings here say so.

Shapes: N rows (batch times time), A active rows, K columns; C loss rows or channels, V vocabulary; D hidden or head
size; P elements of a weight in Q blocks.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_rule import gated_delta_rule, gated_delta_rule_backward  # noqa: F401


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    """Which rows have any non-zero element; bool [N]. NaN is not zero."""
    return dout_NM.ne(0).any(dim=1)


def row_norms(dout_NM: Tensor) -> Tensor:
    """The squared norm of each row, fp32 [N]; fp64 for fp64, whose small numbers fp32 would make zero."""
    return _at_least_fp32(dout_NM).square().sum(dim=1)


def gather_rows(x_NK: Tensor, ids_A: Tensor, count: Tensor | None = None) -> Tensor:
    """X[A]; rows from index `count` on are zero; [A, K], contiguous."""
    x_AK = torch.index_select(x_NK, 0, ids_A)
    if count is not None:
        x_AK.masked_fill_((torch.arange(len(ids_A), device=ids_A.device) >= count)[:, None], 0)
    return x_AK


def scatter_rows(x_AK: Tensor, slots_N: Tensor) -> Tensor:
    """Row n is x's row slots[n], or zero if that is -1; [N, K]."""
    # The row of zeros is the last one, so -1 selects it.
    return torch.cat([x_AK, x_AK.new_zeros(1, x_AK.shape[1])])[slots_N]


def lora_up(
    down_NR: Tensor, weight_MR: Tensor, bias_M: Tensor | None, columns: tuple[int, ...], scaling: float
) -> Tensor:
    """s D_i B_iᵀ + b for projections side by side, [N, M]; D_i are columns of D, B_i rows of B."""
    out_NM = down_NR.new_empty(down_NR.shape[0], weight_MR.shape[0])
    downs = down_NR.chunk(len(columns), dim=1)
    for out, down, lora_B in zip(out_NM.split(columns, dim=1), downs, weight_MR.split(columns), strict=True):
        torch.addmm(out, down, lora_B.T, beta=0, alpha=scaling, out=out)
    return out_NM if bias_M is None else out_NM.add_(bias_M)


def lora_up_backward(
    dout_AM: Tensor, down_AR: Tensor, weight_MR: Tensor, columns: tuple[int, ...], scaling: float
) -> tuple[Tensor, Tensor]:
    """U with U_i = s dY_i B_i, like D, and dB with dB_i = s dY_iᵀ D_i, like B; kernels may give dB in fp32."""
    up_AR, dlora_B_MR = torch.empty_like(down_AR), torch.empty_like(weight_MR)
    for dout, lora_B, dlora_B, down, up in zip(
        *(dout_AM.split(columns, dim=1), weight_MR.split(columns), dlora_B_MR.split(columns)),
        *(each.chunk(len(columns), dim=1) for each in (down_AR, up_AR)),
        strict=True,
    ):
        torch.addmm(up, dout, lora_B, beta=0, alpha=scaling, out=up)
        torch.addmm(dlora_B, dout.T, down, beta=0, alpha=scaling, out=dlora_B)
    return up_AR, dlora_B_MR


def multiply(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """A B, [N, M]; on a GPU by the fastest algorithm, if `tuning` has found it."""
    return a_NK @ b_KM


def add_product_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """out += A B, likewise."""
    out_NM.addmm_(a_NK, b_KM)


def rotate(x_AHE: Tensor, cos_AE: Tensor, sin_AE: Tensor) -> Tensor:
    """Rotary embedding, in fp32 or better: x cos + rotate_half(x) sin, with rotate_half(x) = [-x_2, x_1]."""
    dtype = torch.promote_types(x_AHE.dtype, torch.float32)
    first, second = x_AHE.to(dtype).chunk(2, dim=-1)
    half_AHE = torch.cat([-second, first], dim=-1)
    return (x_AHE * cos_AE[:, None].to(dtype) + half_AHE * sin_AE[:, None].to(dtype)).to(x_AHE.dtype)


def rotate_(q_AHE: Tensor, k_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor) -> None:
    """Rotary embedding of queries and keys, in place."""
    q_AHE.copy_(rotate(q_AHE, cos_AE, sin_AE))
    k_AGE.copy_(rotate(k_AGE, cos_AE, sin_AE))


def rotate_gradients(
    dq_AHE: Tensor, dk_AGE: Tensor, dv_AGE: Tensor, cos_AE: Tensor, sin_AE: Tensor, outs: tuple[Tensor, ...]
) -> None:
    """Writes the gradients of queries and keys before `rotate_`, and dv, to `outs`, such as parts of one matrix."""
    # The transpose of the rotation: rotate_half's is its negative, applied after the sine.
    for dout, out in zip((dq_AHE, dk_AGE), outs, strict=False):
        dtype = torch.promote_types(dout.dtype, torch.float32)
        first, second = (dout.to(dtype) * sin_AE[:, None].to(dtype)).chunk(2, dim=-1)
        out.copy_(dout * cos_AE[:, None].to(dtype) + torch.cat([second, -first], dim=-1))
    outs[2].copy_(dv_AGE)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x r (offset + w) like x, and r = 1 / sqrt(mean(x²) + eps), fp32 [...]; fp64 for fp64."""
    values = _at_least_fp32(x)
    rstd = values.square().mean(dim=-1).add_(eps).rsqrt_()
    return (values * rstd[..., None]).mul_(_at_least_fp32(weight_D) + offset).to(x.dtype), rstd


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float, *, needs_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """dX like x, and dw like w, if needed."""
    dout, normal = _at_least_fp32(dout), _at_least_fp32(x) * rstd[..., None]
    dweight_D = None
    if needs_dweight:
        dweight_D = (dout * normal).reshape(-1, x.shape[-1]).sum(dim=0).to(weight_D.dtype)
    dnormal = dout * (_at_least_fp32(weight_D) + offset)
    mean = (dnormal * normal).mean(dim=-1, keepdim=True)
    return dnormal.sub_(normal.mul_(mean)).mul_(rstd[..., None]).to(x.dtype), dweight_D


def gated(gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """act(gate) * up, [N, M]."""
    return _activate(_at_least_fp32(gate_NM), activation).mul_(up_NM).to(gate_NM.dtype)


def gated_backward(dout_NM: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    """dgate and dup side by side, [N, 2 M]."""
    dout, gate = _at_least_fp32(dout_NM), _at_least_fp32(gate_NM)
    dgate_up_N2M = gate_NM.new_empty(len(gate_NM), 2 * gate_NM.shape[1])
    dgate_NM, dup_NM = dgate_up_N2M.chunk(2, dim=1)
    if activation == "silu":
        dactivated = torch.ops.aten.silu_backward(dout, gate)
    else:
        dactivated = torch.ops.aten.gelu_backward(dout, gate, approximate="tanh")
    torch.mul(dactivated, up_NM, out=dgate_NM)
    torch.mul(_activate(gate, activation), dout, out=dup_NM)
    return dgate_up_N2M


def gated_lora_backward(
    dout_NM: Tensor, up_NR: Tensor, lora_A: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """`gated_backward` of dy + U A, [N, 2 M]; and Uᵀ y, [R, M], which kernels give in fp32. A is [R, M]."""
    dlora_A = up_NR.T @ gated(gate_NM, up_NM, activation)
    return gated_backward(torch.addmm(dout_NM, up_NR, lora_A), gate_NM, up_NM, activation), dlora_A


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def short_convolution(
    x_AC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, positions_A: Tensor, activation: str | None
) -> Tensor:
    """y of `ops/short_convolution.py`, [A, C]."""
    z_AC = _convolved(x_AC, weight_CK, bias_C, positions_A)
    return (z_AC if activation is None else F.silu(z_AC)).to(x_AC.dtype)


def short_convolution_backward(
    dout_AC: Tensor,
    x_AC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    positions_A: Tensor,
    activation: str | None,
    *,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx; and dw and db, if needed."""
    dz_AC = _at_least_fp32(dout_AC)
    if activation is not None:
        dz_AC = torch.ops.aten.silu_backward(dz_AC, _convolved(x_AC, weight_CK, bias_C, positions_A))
    dx_AC, dweight_CK = torch.zeros_like(dz_AC), torch.zeros_like(weight_CK)
    for distance, column, has_row in _distances(weight_CK, positions_A):
        num_rows = len(has_row)
        dz_of_readers = dz_AC[distance:].where(has_row, 0)
        dx_AC[:num_rows] += dz_of_readers * weight_CK[:, column]
        if needs_dweight:
            dweight_CK[:, column] = (dz_of_readers * x_AC[:num_rows].where(has_row, 0)).sum(dim=0)
    if not needs_dweight:
        return dx_AC.to(x_AC.dtype), None, None
    return dx_AC.to(x_AC.dtype), dweight_CK, None if bias_C is None else dz_AC.sum(dim=0).to(bias_C.dtype)


def _convolved(x_AC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, positions_A: Tensor) -> Tensor:
    z_AC = torch.zeros_like(_at_least_fp32(x_AC)) if bias_C is None else _at_least_fp32(bias_C).repeat(len(x_AC), 1)
    for distance, column, has_row in _distances(weight_CK, positions_A):
        # Not by multiplication: a row of another text may be infinite.
        z_AC[distance:] += _at_least_fp32(x_AC[: len(has_row)]).where(has_row, 0) * weight_CK[:, column]
    return z_AC


def _distances(weight_CK: Tensor, positions_A: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """How far each column of the weight reaches back, and whether each row from there on has such a row, [A - d, 1]."""
    num_columns = weight_CK.shape[1]
    for distance in range(min(num_columns, len(positions_A))):
        yield distance, num_columns - 1 - distance, (positions_A[distance:] >= distance)[:, None]


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cross_entropy_and_dlogits_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float | None, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of raw logits, fp32 [C], and their gradient with respect to the logits, if needed.

    The gradient is in the logits' dtype and may overwrite them. The softmax runs in fp32, or in fp64 if the logits are.
    """
    values = _at_least_fp32(logits_CV)
    values = values.mul_(scale) if scale != 1.0 else values
    slope = None
    if softcap is not None:
        capped = torch.tanh(values / softcap)
        slope, values = 1 - capped.square(), capped * softcap
    log_softmax_CV = torch.log_softmax(values, dim=1)
    del values  # of bf16 logits it is a copy
    losses_C = -log_softmax_CV.gather(1, targets_C[:, None]).squeeze(1).float()
    if not needs_gradient:
        return losses_C, None
    dlogits_CV = log_softmax_CV.exp_()
    dlogits_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
    if slope is not None:
        dlogits_CV.mul_(slope)
    if scale != 1.0:
        dlogits_CV.mul_(scale)
    return losses_C, dlogits_CV.to(logits_CV.dtype)


def adamw_(weight: Tensor, gradient: Tensor, moments, adamw, seed: int, factor: Tensor | None) -> None:
    """One AdamW update in place; values stored in fewer bits than fp32 are rounded stochastically."""
    weight_P, gradient_P = weight.view(-1), gradient.reshape(-1).float()
    if factor is not None:
        gradient_P = gradient_P * factor
    codes = moments.exponents is not None
    first, second = (m.view(-1) for m in moments[:2])
    if codes:
        first, second = (
            decode(first, moments.exponents[0], signed=True),
            decode(second, moments.exponents[1], signed=False),
        )
    (beta1, beta2), (correction1, correction2) = adamw.betas, adamw.corrections
    first.mul_(beta1).add_(gradient_P, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient_P, gradient_P, value=1 - beta2)
    update = first / correction1 / ((second / correction2).sqrt_() + adamw.eps)
    values = weight_P * (1 - adamw.learning_rate * adamw.weight_decay) - adamw.learning_rate * update
    is_bf16 = weight.dtype == torch.bfloat16
    bits = random_bits(seed, adamw.step, len(weight_P)) if is_bf16 or codes else None
    weight_P.copy_(round_to_bf16(values, bits & 0xFFFF) if is_bf16 else values)
    if codes:
        encode_(moments.first, moments.exponents[0], first, bits >> 16 & 0xFFFF, signed=True)
        encode_(moments.second, moments.exponents[1], second, bits >> 32, signed=False)


def round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Rounds fp32 values to bf16's precision by uniform integers in [0, 2^16); keeps fp32, NaN and infinity."""
    rounded = ((values.view(torch.int32) + random.int()) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def prune_(out_GM: Tensor, weight_GM: Tensor, n: int, decay: float) -> None:
    """Writes the weights into `out`, those times `decay` that are not among the n largest of their group."""
    # Plus zero, so that no pruned weight is -0.
    torch.where(_is_kept(weight_GM, n), weight_GM, weight_GM * decay + 0.0, out=out_GM)


def shrink_pruned_(weight_P: Tensor, pruned_P: Tensor, shrinkage: float, seed: int, step: int) -> None:
    """Shrinks the weights where the pruned weight is 0; rounds bf16 stochastically."""
    shrunk = _at_least_fp32(weight_P) * (1 - shrinkage)
    if weight_P.dtype == torch.bfloat16:
        bits = random_bits(seed, torch.tensor(step, device=shrunk.device), shrunk.numel())
        shrunk = round_to_bf16(shrunk, bits & 0xFFFF)
    weight_P.copy_(torch.where(pruned_P == 0, shrunk.to(weight_P.dtype), weight_P))


def _is_kept(weight_GM: Tensor, n: int) -> Tensor:
    """Whether each weight is one of the n largest of its group in magnitude, of equal ones the first; bool [G, M]."""
    magnitude_GM = weight_GM.abs()
    smallest_G1 = magnitude_GM.topk(n, dim=1).values[:, -1:]
    above, equal = magnitude_GM > smallest_G1, magnitude_GM == smallest_G1
    return above | (equal & (equal.cumsum(1) <= n - above.sum(1, keepdim=True)))


# Elements that share an exponent, and how far below it theirs can be: 4 bits beside a sign, 5 bits without one.
BLOCK = 256
_LOWER_EXPONENTS = {True: 15, False: 31}


def decode(codes_P: Tensor, exponents_Q: Tensor, signed: bool) -> Tensor:
    """The fp32 values of 8-bit codes: 0 is zero, all others are the upper bits of fp32 relative to their block."""
    magnitudes = codes_P.int() & 0x7F if signed else codes_P.int()
    exponents = exponents_Q.int().repeat_interleave(BLOCK)[: len(codes_P)]
    bits = (exponents - _LOWER_EXPONENTS[signed] << 23) + (magnitudes << 20)
    values = bits.where((magnitudes > 0) & (bits > 0), 0).view(torch.float32)
    return torch.where(codes_P > 0x7F, -values, values) if signed else values


def encode_(codes_P: Tensor, exponents_Q: Tensor, values_P: Tensor, random_P: Tensor, signed: bool) -> None:
    """Writes 8-bit codes of values and their blocks' exponents, rounded by uniform integers in [0, 2^16).

    Values may be negative if they are signed; else none is rounded to zero.
    """
    # NaN and infinity keep an exponent of 255, and no sum below overflows.
    bits = (values_P.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7FF00000)
    blocks = torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK)).view(-1, BLOCK)
    # The exponent of the largest if it is rounded up.
    exponents = blocks.amax(dim=1) + 0xFFFFF >> 23
    lowest = (exponents - _LOWER_EXPONENTS[signed] << 3).repeat_interleave(BLOCK)[: len(bits)]
    codes = (bits + (random_P.int() << 4) >> 20) - lowest
    if signed:
        codes = codes.clamp(0, 0x7F) + (values_P.signbit().int() << 7)
    else:
        codes = torch.maximum(codes, (bits > 0).int()).clamp(max=0xFF)
    codes_P.copy_(codes)
    exponents_Q.copy_(exponents)


def random_bits(seed: int, step: Tensor, count: int) -> Tensor:
    """48 random bits per element, int64 [count]: SplitMix64 (Steele et al. 2014) of its index, step and seed."""
    indices = torch.arange(1, count + 1, device=step.device)
    return _split_mix(indices * -0x61C8864680B583EB + _split_mix(step + (seed << 32))) & 0xFFFFFFFFFFFF


def _split_mix(state: Tensor) -> Tensor:
    # Products wrap around; the masks keep the sign out of the shifts.
    state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ (state >> 31 & 0x1FFFFFFFF)
