"""fla-core's kernels for the gated delta rule of linear attention, which take packed rows and restart at each text.

transformers' own code takes padded texts, and keeps some forty fp32 tensors of each row for the backward pass. Kernels
replace it where they agree with it: on Hopper, Triton before 3.7.1 compiles them wrongly.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.engine.sparse.patches.agreement import ATTENTION, FULL_PRECISION
from sebp_edge.engine.sparse.patches.patch import has_own_forward

# The functions that transformers' layers call.
CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
DEVICES = ("cuda",)
# Rows that kernels compute at once; and the trial's texts, one of them longer than two chunks.
CHUNK, LENGTHS = 64, (150, 1, 64, 70)


def fla_version() -> str | None:
    """Returns the version of fla-core; None if it is not installed."""
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return None


def kernel_for(layer: nn.Module) -> Callable | None:
    """Returns fla's rule if it computes what the layer's own does on its device, in its dtype; else None."""
    own, names = inspect.unwrap(type(layer).forward), ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    sizes, installed = [getattr(layer, name, None) for name in names], fla_version()
    is_known = {CONVOLUTION, RULE} <= {*own.__code__.co_names} and None not in sizes and has_own_forward(layer)
    if not (installed and is_known and layer.conv1d.weight.device.type in DEVICES):
        return None
    if "repeat_interleave" in own.__code__.co_names:  # as in transformers 5.17, which repeats keys for its own rule
        sizes[0] = sizes[1]
    rule, weight = inspect.unwrap(own.__globals__[RULE]), layer.conv1d.weight
    return _tried(rule, *sizes, weight.dtype, weight.device, installed)


def packed_options(cu_seqlens: Tensor, num_rows: int) -> dict[str, Tensor]:
    """Returns the keywords that tell kernels where texts begin among so many rows: int32 [S + 1], int32 [chunks, 2].

    The latter are the text of each chunk and its number there, as many as S texts of so many rows may have. Those that
    they do not have lie behind the last row, where kernels read and write nothing.
    """
    most = (num_rows + (CHUNK - 1) * (len(cu_seqlens) - 1)) // CHUNK
    ends = ((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0)
    chunks = torch.arange(most, device=ends.device)
    # Of an empty text, kernels would read the row before.
    texts = torch.searchsorted(ends, torch.minimum(chunks, ends[-1] - 1), right=True)
    places = torch.where(chunks < ends[-1], chunks - F.pad(ends, (1, 0))[texts], most)
    return {"cu_seqlens": cu_seqlens, "chunk_indices": torch.stack([texts, places], dim=1).int()}


@functools.lru_cache(maxsize=16)
def _tried(own: Callable, key_heads, heads, key_size, size, dtype, device, installed) -> Callable | None:
    """Returns the kernels' rule if results and all gradients agree with the layer's in fp32 on one text at a time."""
    shapes = ((key_heads, key_size), (key_heads, key_size), (heads, size), (heads,), (heads,), (heads, size))
    draw, num_rows = torch.Generator(device).manual_seed(0), sum(LENGTHS)
    random = (torch.randn(1, num_rows, *each, generator=draw, device=device).to(dtype) for each in shapes)
    query, key, value, g, beta, dout = random
    # States reach over several chunks.
    inputs = query, key, value, g.float().sigmoid() / -16, beta.sigmoid(), dout
    cu_seqlens = F.pad(torch.tensor(LENGTHS, device=device).cumsum(0), (1, 0)).int()
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        if "chunk_indices" not in inspect.signature(rule).parameters:
            return None  # fla before 0.6 reads lengths on the host
        found = _results(functools.partial(rule, **packed_options(cu_seqlens, num_rows)), *inputs)
    except Exception as error:  # of a compiler
        if ran_out_of_memory(error):
            raise
        return None
    texts = zip(*(each.float().split(LENGTHS, dim=1) for each in inputs), strict=True)
    expected = [torch.cat(parts, dim=1) for parts in zip(*(_results(own, *text) for text in texts), strict=True)]
    tolerance = ATTENTION if dtype in (torch.bfloat16, torch.float16) else FULL_PRECISION
    pairs = zip(expected, found, strict=True)
    return rule if all((one - other).norm() <= tolerance * one.norm() for one, other in pairs) else None


@torch.enable_grad()
def _results(rule: Callable, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs but the last, which is the output's gradient."""
    query, key, value, g, beta = leaves = [each.detach().requires_grad_() for each in inputs[:-1]]
    out, _ = rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[-1])]
