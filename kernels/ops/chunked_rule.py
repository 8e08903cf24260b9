"""The gated delta rule on packed texts in plain PyTorch: chunks of rows, and few heads at once.

The products within a chunk, and its state, are those of the kernels (see `gpu/delta_rule.py`), in fp32 or fp64. States
pass on from the first chunks of all texts to their second ones, and so on. The backward pass computes all of it again.

Shapes: A rows, N chunks, C their rows; g heads of keys, of size E; p heads of values for each, of size F.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# What is added to the sum of the squares of a query or a key; and the rows of a chunk.
EPSILON, CHUNK = 1e-6, 32
# About how many numbers of values are computed at once.
NUMBERS = 2**21


class _Layout(NamedTuple):
    """Where the rows of chunks are.

    Attributes:
        rows_NC: the row of each, or A where a chunk has none; all first chunks of texts, then all second ones, ...
        places_A: where each row is among these.
        counts: the number of first chunks, of second ones, ..., which are those of the first so many texts.
    """

    rows_NC: Tensor
    places_A: Tensor
    counts: list[int]

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_rows: int) -> "_Layout":
        begins, ends = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
        texts = sorted(zip(begins, ends, strict=True), key=lambda text: text[0] - text[1])
        longest = max((end - begin for begin, end in texts), default=0)
        steps = [
            [(begin + done, end) for begin, end in texts if begin + done < end] for done in range(0, longest, CHUNK)
        ]
        begins_N, ends_N = torch.tensor([chunk for step in steps for chunk in step]).T
        rows_NC = begins_N[:, None] + torch.arange(CHUNK)
        rows_NC = rows_NC.where(rows_NC < ends_N[:, None], num_rows)
        places_A = rows_NC.flatten().argsort(stable=True)[:num_rows]
        return cls(rows_NC.to(cu_seqlens.device), places_A.to(cu_seqlens.device), list(map(len, steps)))

    def split(self, x_A: Tensor) -> Tensor:
        """The rows of chunks, [N, C, ...], zeros where there are none."""
        padded = F.pad(x_A.flatten(1), (0, 0, 0, 1))  # on a CPU, rows of matrices are gathered fastest
        return padded.index_select(0, self.rows_NC.flatten()).view(*self.rows_NC.shape, *x_A.shape[1:])


def gated_delta_rule(
    q_AGE: Tensor, k_AGE: Tensor, v_AHF: Tensor, g_AH: Tensor, beta_AH: Tensor, chunks: tuple[Tensor, ...], erases: bool
) -> Tensor:
    """The rule of `delta_rule`; kernels round the inputs of products (see there)."""
    inputs = _wide(q_AGE, k_AGE, v_AHF, g_AH, beta_AH)
    out_AHF = inputs[2].new_empty(v_AHF.shape)
    if out_AHF.numel():
        layout = _Layout.of(chunks[0], len(v_AHF))
        for keys, values in _groups(k_AGE, v_AHF):
            out_AHF[:, values] = _attend(*_part(inputs, keys, values), layout, erases)
    return out_AHF.to(v_AHF.dtype) if erases else out_AHF


def gated_delta_rule_backward(
    dout: Tensor,
    q_AGE: Tensor,
    k_AGE: Tensor,
    v_AHF: Tensor,
    g_AH: Tensor,
    beta_AH: Tensor,
    chunks: tuple[Tensor, ...],
    erases: bool,
) -> tuple[Tensor, ...]:
    given = q_AGE, k_AGE, v_AHF, g_AH, beta_AH
    inputs = _wide(*given)
    found = [torch.zeros_like(x) for x in inputs]
    if dout.numel():
        layout = _Layout.of(chunks[0], len(v_AHF))
        for keys, values in _groups(k_AGE, v_AHF):
            parts = [x.detach().requires_grad_() for x in _part(inputs, keys, values)]
            with torch.enable_grad():
                out = _attend(*parts, layout, erases)
            gradients = torch.autograd.grad(out, parts, dout[:, values].to(out.dtype))
            for whole, gradient in zip(_part(found, keys, values), gradients, strict=True):
                whole += gradient
    return tuple(gradient.to(x.dtype) for gradient, x in zip(found, given, strict=True))


def _groups(k_AGE: Tensor, v_AHF: Tensor) -> list[tuple[slice, slice]]:
    """The heads of keys and those of values that are computed at once: whole heads of keys, or parts of one."""
    num_keys, (num_rows, num_values, value_size) = k_AGE.shape[1], v_AHF.shape
    per_key, most = num_values // num_keys, max(1, NUMBERS // (num_rows * value_size))
    if most >= per_key:
        step = most // per_key
        firsts = range(0, num_keys, step)
        return [(slice(key, key + step), slice(key * per_key, (key + step) * per_key)) for key in firsts]
    number = max(number for number in range(1, most + 1) if per_key % number == 0)
    return [
        (slice(value // per_key, value // per_key + 1), slice(value, value + number))
        for value in range(0, num_values, number)
    ]


def _part(tensors: list[Tensor], keys: slice, values: slice) -> list[Tensor]:
    q, k, *others = tensors
    return [q[:, keys], k[:, keys], *(x[:, values] for x in others)]


def _attend(
    q_AgE: Tensor, k_AgE: Tensor, v_AhF: Tensor, g_Ah: Tensor, beta_Ah: Tensor, layout: _Layout, erases: bool
) -> Tensor:
    """The outputs of some heads, [A, g p, F]. In the einsums, i and j are rows of a chunk."""
    num_keys, key_size = k_AgE.shape[1:]
    q, k = (layout.split(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)) for x in (q_AgE, k_AgE))
    v, g, beta = (layout.split(x.unflatten(1, (num_keys, -1))) for x in (v_AhF, g_Ah, beta_Ah))
    q = q * key_size**-0.5
    sums = g.cumsum(1)
    total, early = sums[:, -1], sums.exp()[..., None]
    late = (total[:, None] - sums).exp()[..., None]
    decays = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp()
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()[:, :, None, None]
    weights = torch.einsum("nige,njge->nijg", q, k)[..., None] * decays * lower
    system = beta[:, :, None] * torch.einsum("nige,njge->nijg", k, k)[..., None] * decays if erases else None

    outs, state = [], None
    # Not slices, whose gradients would each be as large as the whole.
    parts = (q, k, v, beta[..., None], early, late, total.exp()[:, :, None, :, None], weights)
    steps = zip(*(x.split(layout.counts) for x in (parts if system is None else (*parts, system))), strict=True)
    for q_n, k_n, written, beta_n, early_n, late_n, total_n, weights_n, *system_n in steps:
        state = None if state is None else state[: len(q_n)]
        if system_n and state is not None:
            written = written - early_n * torch.einsum("nige,ngepf->nigpf", k_n, state)
        written = beta_n * written
        if system_n:
            written = _solve(*system_n, written)
        out = torch.einsum("nijgp,njgpf->nigpf", weights_n, written)
        if state is not None:
            out = out + early_n * torch.einsum("nige,ngepf->nigpf", q_n, state)
        outs.append(out)
        added = torch.einsum("nige,nigpf->ngepf", k_n, late_n * written)
        state = added if state is None else total_n * state + added
    out_RJF = torch.cat(outs).flatten(2, 3).flatten(0, 1)
    return out_RJF.flatten(1).index_select(0, layout.places_A).view(-1, *out_RJF.shape[1:])


def _solve(system_nijgp: Tensor, right_njgpf: Tensor) -> Tensor:
    """x of (1 + the part of the system below its diagonal) x = right, [n, i, g, p, f]."""
    lower, right = system_nijgp.permute(0, 3, 4, 1, 2), right_njgpf.permute(0, 2, 3, 1, 4)
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True).permute(0, 3, 1, 2, 4)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """All of them in fp32, or in fp64 if the values are."""
    dtype = torch.promote_types(tensors[2].dtype, torch.float32)
    return [x.to(dtype) for x in tensors]
