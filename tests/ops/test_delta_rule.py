"""The gated delta rule equals transformers' own, text by text, and so do its gradients."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from sebp_edge import ops


def draw_inputs(num_rows, heads=(2, 4), sizes=(8, 16), dtype=torch.float32, device="cpu"):
    """Queries, keys, values, decays and strengths; states last for some rows."""
    (G, H), (E, F) = heads, sizes
    shapes = (G, E), (G, E), (H, F), (H,), (H,)
    q, k, v, g, beta = (torch.randn(num_rows, *shape, dtype=torch.float64) for shape in shapes)
    # Keys alike, as those of a text are.
    k = k + 2 * k[:1]
    inputs = q, k, v, -0.2 * g.exp(), 2 * beta.sigmoid()
    return [each.to(device, dtype).requires_grad_() for each in inputs]


def chunks_of(lengths, device="cpu"):
    return ops.Chunks.of(torch.tensor([0, *lengths], device=device).cumsum(0).int(), sum(lengths))


def of_transformers(q, k, v, g, beta, lengths):
    """transformers' rule on one text at a time, in fp32."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    outs = []
    for text in zip(
        *(x[None].split(lengths, dim=1) for x in (q, k, v)),
        g[None].split(lengths, dim=1),
        beta[None].split(lengths, dim=1),
        strict=True,
    ):
        if text[0].shape[1]:
            outs.append(
                torch_chunk_gated_delta_rule(*text[:3], g=text[3], beta=text[4], use_qk_l2norm_in_kernel=True)[0][0]
            )
    return torch.cat(outs)


def results(function, inputs, dout):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]
