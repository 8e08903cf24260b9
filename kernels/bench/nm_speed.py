"""Times N:M pruning, and inference with 2:4 weights by torch's sparse kernels beside dense ones.

    python kernels/bench/nm_speed.py [--record [FILE]]     on a GPU with sparse kernels; shapes of Llama-3.2-3B

products      each layer's product, for 1 to 4,096 rows: GPU time in graph replays, over copies of the weight that
              together do not fit into the cache, as the layers of a model
generation    a 3B decoder with random weights, all its linear layers but the head 2:4: a prompt's pass and each further
              token in transformers' own `generate`, and what the weights take
pruning       one pass over a large weight by pattern and dtype, beside a copy of it

Correctness comes first: a product, and a prompt's last logits, may err from fp32 by twice as much as dense bf16 does.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import evidence
from models import known_config, make_model
from sebp_edge.insight.bench.correctness import in_fp32
from sebp_edge.insight.bench.timer import seconds
from sebp_edge.machine.devices import release_memory
from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.ops.timing import milliseconds
from sebp_edge.pruning.semi_structured import semi_structured
from sebp_edge.research import nm_sparse

MODEL = "llama-3.2-3b"
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)
PROMPTS = (16, 128, 512, 1024, 4096)
NEW_TOKENS, REPEATS = 33, 5
# More than the cache of any GPU in question.
WEIGHTS_BYTES = 200_000_000
PRUNED_SHAPE = (16384, 8192)
PATTERNS = ((2, 4), (1, 8), (1, 16), (1, 32))
SOURCES = (
    *evidence.OPS,
    "sebp_edge/pruning",
    "sebp_edge/insight/bench/timer.py",
    "kernels/bench/models.py",
    __file__,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    evidence.add_record_option(parser)
    options = parser.parse_args()
    device = torch.device("cuda")
    with torch.no_grad():
        for name, rows in (("products", products), ("generation", generation), ("pruning", pruning)):
            found = []
            for row in rows(device):
                print(name, row, flush=True)
                found.append(row)
            if options.record:
                evidence.record(f"nm-{name}", SOURCES, found, options.record)


# ------------------------------------------------------------------------------------------------------------- products


def products(device: torch.device) -> Iterator[dict]:
    config = known_config(MODEL)
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    shapes = {"q, o": (hidden, hidden), "k, v": (keys, hidden), "gate, up": (inner, hidden), "down": (hidden, inner)}
    for layer, (outputs, inputs) in shapes.items():
        dense = copies(outputs, inputs, device)
        sparse = [nn.Linear(inputs, outputs, bias=False, device="meta") for _ in dense]
        for each, weight in zip(sparse, dense, strict=True):
            each.weight = nn.Parameter(weight.clone())
        with semi_structured(nn.ModuleList(sparse)):
            for num_rows in ROWS:
                x = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
                times = {
                    "dense": time_over([partial(F.linear, weight=weight) for weight in dense], x),
                    "sparse": time_over(sparse, x),
                }
                exact = x.float() @ dense[0].float().T
                errors = [relative_error(found, exact) for found in (F.linear(x, dense[0]), sparse[0](x))]
                require(errors[1], errors[0], f"{layer}, {num_rows} rows")
                yield {
                    "layer": layer,
                    "outputs": outputs,
                    "inputs": inputs,
                    "rows": num_rows,
                    **{f"{kind}_us": 1e3 * ms for kind, ms in times.items()},
                    "dense_error": errors[0],
                    "sparse_error": errors[1],
                }


def copies(outputs: int, inputs: int, device: torch.device) -> list[torch.Tensor]:
    """Different 2:4 weights, too many for the cache."""
    found = []
    for _ in range(max(2, WEIGHTS_BYTES // (2 * outputs * inputs))):
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        found.append(torch.empty_like(weight))
        prune_(found[-1], weight, 2, 4)
    return found


def time_over(layers: list[Callable], x: torch.Tensor) -> float:
    """Milliseconds of one product."""
    return milliseconds(lambda: [layer(x) for layer in layers], calls=2) / len(layers)


# ----------------------------------------------------------------------------------------------------------- generation


def generation(device: torch.device) -> Iterator[dict]:
    model = make_model(known_config(MODEL), device).eval()
    nm_sparse(model, "2:4", "sr-ste", num_steps=1).remove()
    prompts = [torch.randint(10, model.config.vocab_size, (1, length), device=device) for length in PROMPTS]
    dense = [last_logits(model, ids) for ids in prompts]
    with in_fp32(model):
        exact = [last_logits(model, ids) for ids in prompts]
    for kind in ("dense", "sparse"):
        release_memory(device)
        with semi_structured(model) if kind == "sparse" else nullcontext():
            weights_gib = torch.cuda.memory_allocated(device) / 2**30
            for ids, truth, rounded in zip(prompts, exact, dense, strict=True):
                error, allowed = relative_error(last_logits(model, ids), truth), relative_error(rounded, truth)
                require(error, allowed, f"{kind}, a prompt of {ids.shape[1]} tokens")
                prompt_ms = median_ms(lambda ids=ids: last_logits(model, ids), device)
                whole_ms = median_ms(lambda ids=ids: continued(model, ids, NEW_TOKENS), device)
                first_ms = median_ms(lambda ids=ids: continued(model, ids, 1), device)
                yield {
                    "weights": kind,
                    "prompt": ids.shape[1],
                    "prompt_ms": prompt_ms,
                    "token_ms": (whole_ms - first_ms) / (NEW_TOKENS - 1),
                    "weights_gib": weights_gib,
                    "error": error,
                    "dense_error": allowed,
                }


def last_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=True, logits_to_keep=1).logits


def continued(model: nn.Module, ids: torch.Tensor, number: int) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=number, min_new_tokens=number, do_sample=False, pad_token_id=0
    )


def median_ms(function, device: torch.device) -> float:
    function()
    return statistics.median(1e3 * seconds(function, device) for _ in range(REPEATS))


# -------------------------------------------------------------------------------------------------------------- pruning


def pruning(device: torch.device) -> Iterator[dict]:
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(PRUNED_SHAPE, device=device, dtype=dtype)
        out = torch.empty_like(weight)
        copy_ms = milliseconds(lambda out=out, weight=weight: out.copy_(weight))
        for n, m in PATTERNS:
            expected = kept_by_sorting(weight[:64], n, m)
            prune_(out, weight, n, m)
            if not torch.equal(out[:64], weight[:64] * expected):
                raise RuntimeError(f"{n}:{m} {dtype}: the kernel keeps other weights than sorting does.")
            yield {
                "pattern": f"{n}:{m}",
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": weight.nbytes,
                "prune_ms": milliseconds(lambda n=n, m=m, out=out, weight=weight: prune_(out, weight, n, m)),
                "shrink_ms": milliseconds(lambda out=out, w=weight: shrink_pruned_(w, out, 1e-9, seed=0, step=1)),
                "copy_ms": copy_ms,
            }


def kept_by_sorting(weight: torch.Tensor, n: int, m: int) -> torch.Tensor:
    groups = weight.abs().double().reshape(-1, m)
    order = groups.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(groups).scatter_(1, order[:, :n], 1.0).view(weight.shape).to(weight.dtype)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


def require(error: float, dense_error: float, what: str) -> None:
    """Raises RuntimeError if sparse kernels err by more than twice as much as dense ones."""
    if not error <= 2 * dense_error + 1e-4:
        raise RuntimeError(f"{what}: off by {error:.1e}, the dense weights by {dense_error:.1e}.")


if __name__ == "__main__":
    main()
