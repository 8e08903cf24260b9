"""Times one layer on a GPU: sparse_linear's backward pass beside dense and the limit, lora_linear beside PEFT.

    python kernels/bench/speed/layers.py [--record [FILE]]

sparse_linear: dX and dW, with a zero-filled dX of full size, as in the paper. The limit is cuBLAS on rows that are
already compact, plus the zero fill. lora_linear: forward and backward of a group of projections with fp32 adapters on a
bf16 base, against PEFT's layers on the same rows. Each shape is checked before it is timed. Milliseconds are medians
over replays of captured graphs.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.engine.models.lora import plain_projection
from sebp_edge.ops import LoraGroup, lora_linear, sparse_linear
from sebp_edge.ops.measure import milliseconds, relative_error
from speed.graph_time import make_backward

LAYERS = [(3072, 8192), (8192, 3072), (3072, 3072), (3072, 1024), (768, 3072)]
NUM_ROWS = (4096, 16384)
SHARES = (0.015, 0.05, 0.2, 0.5)
PATTERNS = ("random", "1 span", "8 spans", "32 spans")
RANK = 16
SOURCES = (*evidence.OPS, "sebp_edge/engine/models/lora.py", "kernels/bench/speed/graph_time.py", __file__)


def main() -> None:
    options = evidence.parser(__doc__).parse_args()
    torch.manual_seed(0)
    records = [*linear_records(), *lora_records()]
    evidence.record("layers", SOURCES, records, options.record)


def linear_records():
    for num_in, num_out in LAYERS:
        for num_rows in NUM_ROWS:
            for share in SHARES:
                for pattern in PATTERNS:
                    record = {"layer": f"{num_in}->{num_out}", "rows": num_rows, "active": share, "pattern": pattern}
                    record |= time_linear(num_in, num_out, num_rows, make_rows(num_rows, share, pattern))
                    yield evidence.show(record)


def make_rows(num_rows: int, share: float, pattern: str) -> Tensor:
    """Increasing ids of about `share` of the rows: scattered, or one span in each of several right-padded sequences."""
    active = round(num_rows * share)
    if pattern == "random":
        return torch.randperm(num_rows)[:active].sort().values.cuda()
    sequences = int(pattern.split()[0])
    length, per_sequence = num_rows // sequences, max(1, active // sequences)
    return torch.cat([torch.arange(per_sequence) + number * length for number in range(sequences)]).cuda()


def as_span(rows: Tensor) -> Tensor | slice:
    """The rows as a slice if they are contiguous, as in a RowPlan; else the ids."""
    begin, end = int(rows[0]), int(rows[-1]) + 1
    return slice(begin, end) if end - begin == len(rows) else rows


def time_linear(num_in: int, num_out: int, num_rows: int, rows: Tensor) -> dict[str, float]:
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    dout = torch.zeros(num_rows, num_out, device="cuda", dtype=torch.bfloat16)
    dout[rows] = torch.randn(len(rows), num_out, device="cuda", dtype=torch.bfloat16)
    compact_dout, compact_x = dout[rows], x.detach()[rows]

    def index_select():
        chosen = dout.index_select(0, rows)
        dx = torch.zeros_like(x)
        dx.index_copy_(0, rows, chosen @ weight.detach())
        return dx, chosen.T @ compact_x

    def limit():
        torch.zeros_like(x)
        return compact_dout @ weight.detach(), compact_dout.T @ compact_x

    implementations = {
        "dense": make_backward(lambda: F.linear(x, weight), (x, weight), dout),
        "ours": make_backward(lambda: sparse_linear(x, weight, rows=as_span(rows)), (x, weight), dout),
        "index": index_select,
        "limit": limit,
    }
    truth = [gradient.float() for gradient in (dout.double() @ weight.double(), dout.double().T @ x.double())]
    allowed = [relative_error(found, true) for found, true in zip(implementations["dense"](), truth, strict=True)]
    for name in ("ours", "index"):
        for found, true, most in zip(implementations[name](), truth, allowed, strict=True):
            if not relative_error(found, true) <= 2 * most + 1e-4:
                raise SystemExit(f"{name} is wrong for {num_in}->{num_out}, {len(rows)} of {num_rows} rows")
    return {name: milliseconds(function, repeats=20) for name, function in implementations.items()}


# --------------------------------------------------------------------------------------------------------------- LoRA

GROUPS = {"q, k, v": (3072, (3072, 1024, 1024)), "gate, up": (3072, (8192, 8192)), "down": (8192, (3072,))}


def lora_records():
    for name, (num_in, outs) in GROUPS.items():
        for num_rows in (128, 512, 1024, 4096):
            yield evidence.show({"layer": name, "rows": num_rows, **time_lora(num_in, outs, num_rows)})


def time_lora(num_in: int, outs: tuple[int, ...], num_rows: int) -> dict[str, float]:
    base = nn.Module()
    for number, num_out in enumerate(outs):
        base.add_module(f"layer{number}", nn.Linear(num_in, num_out, bias=False, dtype=torch.bfloat16, device="cuda"))
    targets = [f"layer{number}" for number in range(len(outs))]
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, init_lora_weights=False)
    layers = list(get_peft_model(base, config).base_model.model.children())
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    douts = [torch.randn(num_rows, num_out, device="cuda", dtype=torch.bfloat16) for num_out in outs]
    projections = [plain_projection(layer) for layer in layers]
    group = LoraGroup.stack(projections)
    inputs = [x, *(p.lora_A for p in projections), *(p.lora_B for p in projections)]

    def run(forward):
        return lambda: torch.autograd.grad(forward(), inputs, douts)

    implementations = {
        "peft": run(lambda: tuple(layer(x) for layer in layers)),
        "ours": run(lambda: lora_linear(x, group)),
    }
    for found, true in zip(implementations["ours"](), implementations["peft"](), strict=True):
        if not relative_error(found, true.float()) <= 0.02:
            raise SystemExit(f"lora_linear is wrong for {num_in}->{outs}, {num_rows} rows")
    return {name: milliseconds(function, repeats=20) for name, function in implementations.items()}


if __name__ == "__main__":
    main()
