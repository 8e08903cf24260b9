"""Times one layer's attention over short texts on a GPU: torch's flash attention with our rotation, and our kernels.

    python kernels/bench/speed/attention.py [--record [FILE]]

Texts have 26 to 128 tokens, about 57 on average, in bf16, with the rotary embedding included. The longest length is
rounded up to a power of two, as in token buckets. Before anything is timed, our error against attention in fp64 must be
at most twice flash attention's, plus 1e-4. Microseconds are medians over replays of captured graphs.
"""

import random
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.ops import Scores, backend, sequence_attention_
from sebp_edge.ops.measure import milliseconds, relative_error
from speed.graph_time import make_backward

# Heads, key/value heads, head size.
SHAPES = {"Llama-3.2-3B": (24, 8, 128), "Qwen3-0.6B": (16, 8, 128), "SmolLM2-135M": (9, 3, 64)}
NUM_TEXTS = (1, 4, 16, 64)
SOURCES = (*evidence.OPS, "kernels/bench/speed/graph_time.py", __file__)


def main() -> None:
    options = evidence.parser(__doc__).parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    lengths = [max(26, min(128, int(draw.gauss(57, 25)))) for _ in range(max(NUM_TEXTS))]
    records = []
    for model, shape in SHAPES.items():
        for count in NUM_TEXTS:
            record = {"model": model, "texts": count, "tokens": sum(lengths[:count])}
            records.append(evidence.show(record | time_attention(*shape, lengths[:count])))
    evidence.record("attention", SOURCES, records, options.record)


def time_attention(num_heads: int, num_kv_heads: int, head_size: int, lengths: list[int]) -> dict[str, float]:
    """Microseconds by column; exits if our kernels are wrong."""
    num_rows, longest = sum(lengths), 1 << (max(lengths) - 1).bit_length()
    wide = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_size, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(num_rows, head_size // 2, device="cuda").mul(6.28).repeat(1, 2)
    rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    dout = torch.randn(num_rows, num_heads, head_size, device="cuda", dtype=torch.bfloat16)

    def make_parts(dtype: torch.dtype) -> list[Tensor]:
        parts = wide.to(dtype, copy=True).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return [part.detach().requires_grad_() for part in parts]

    def results(dtype: torch.dtype) -> list[Tensor]:
        parts, cos_and_sin = make_parts(dtype), tuple(each.to(dtype) for each in rotary)
        out = sequence_attention_(*parts, cu_seqlens, longest, Scores(), cos_and_sin)
        return [out.detach(), *torch.autograd.grad(out, parts, dout.to(dtype))]

    def times() -> tuple[float, ...]:
        # The rotation is in place, so each call rotates the queries again; that does not change the time.
        parts = make_parts(torch.bfloat16)

        def forward():
            return sequence_attention_(*parts, cu_seqlens, longest, Scores(), rotary)

        passes = forward, make_backward(forward, parts, dout)
        return tuple(1000 * milliseconds(run_pass, repeats=20) for run_pass in passes)

    if not backend.runs_short_attention(wide, wide, wide):
        raise SystemExit("Our attention kernels do not run here, so there is nothing to compare.")
    with mock.patch.object(backend, "runs_short_attention", return_value=False):
        flash, (flash_forward, flash_backward) = results(torch.bfloat16), times()
    for name, found, other, truth in zip(
        ("out", "dq", "dk", "dv"), results(torch.bfloat16), flash, results(torch.float64), strict=True
    ):
        error, allowed = relative_error(found, truth), 2 * relative_error(other, truth) + 1e-4
        if not error <= allowed:
            raise SystemExit(f"{name} of our kernels has an error of {error:.2g}, above {allowed:.2g}: {lengths}")
    our_forward, our_backward = times()
    found = {"flash forward": flash_forward, "our forward": our_forward}
    return found | {"flash backward": flash_backward, "our backward": our_backward}


if __name__ == "__main__":
    main()
