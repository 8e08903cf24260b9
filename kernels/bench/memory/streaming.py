"""Compares steps whose blocks are streamed from host memory with resident ones, and with the bus, in one run on a GPU.

    python kernels/bench/memory/streaming.py [--record [FILE]] [--only SHAPE] [--rounds NUMBER]

A step of a captured graph, with random weights of the true shape and an adapter of rank 16. Its limit is the larger of
the resident step and two copies of the streamed weights at the rate that copies from locked memory reach here. Losses
and gradients of both are compared, too.
"""

import gc
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config
from sebp_edge import Recipe
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.learner import Learner
from sebp_edge.events import silent
from sebp_edge.machine import devices
from sebp_edge.values.example import Example, outlines
from speed.end_to_end import ensure_model_folder

CUDA = torch.device("cuda:0")
# Shapes in 4 bits and not, and the numbers of tokens of a step.
SHAPES = (("llama-3.2-3b", True), ("llama-3.1-8b", True), ("llama-3.2-3b", False))
TOKENS = (256, 1024, 4096)
SOURCES = (*evidence.STEP, "sebp_edge/engine/models", "sebp_edge/machine", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=7, metavar="NUMBER")
    default = Path(tempfile.gettempdir()) / "sebp-edge-memory"
    parser.add_argument("--work", type=Path, default=default, metavar="FOLDER", help=f"by default {default}")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for shape, in_4_bits in SHAPES:
        if not options.only or shape in options.only:
            rows += compare(shape, in_4_bits, ensure_model_folder(options.work / shape, known_config(shape)), options)
    evidence.record("streaming", SOURCES, rows, options.record)


def compare(shape: str, in_4_bits: bool, folder: Path, options) -> list[dict]:
    """One row for each number of tokens."""
    blocks, measured = known_config(shape).num_hidden_layers, {}
    for streamed in (0, blocks):
        recipe = Recipe(name="streaming", description="", load_in_4bit=in_4_bits, r=16, context_length=max(TOKENS))
        torch.cuda.reset_peak_memory_stats()
        base = load_base_model(resolve(str(folder)), recipe, CUDA, streamed_blocks=streamed)
        loaded = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        measured[bool(streamed)] = [loaded, *(step(base, recipe, tokens, blocks, options.rounds) for tokens in TOKENS)]
        if streamed:
            host = sum(each.nbytes for each in streamed_hosts(base.model))
        del base
        gc.collect()  # a layer in 4 bits and its weight refer to each other
        devices.release_memory(CUDA)
    rate, rows = devices.bus_rate(CUDA), []
    for tokens, resident, found in zip(TOKENS, measured[False][1:], measured[True][1:], strict=True):
        limit = max(resident["ms"], 2e3 * host / rate)
        row = {"model": shape, "dtype": "nf4" if in_4_bits else "bfloat16", "tokens": tokens}
        row |= {"resident_ms": resident["ms"], "streamed_ms": found["ms"], "copies_ms": 2e3 * host / rate}
        row |= {"bus_gb_per_s": rate / 1e9, "times_limit": found["ms"] / limit}
        row |= {"resident_gb": resident["peak"] / 1e9, "streamed_gb": found["peak"] / 1e9}
        row |= {"loading_gb": measured[True][0][1] / 1e9, "host_gb": host / 1e9}
        row |= {"same_loss": resident["loss"] == found["loss"]}
        row |= {"same_gradients": all(map(torch.equal, resident["gradients"], found["gradients"]))}
        rows.append(evidence.show(row))
    return rows


def step(base, recipe: Recipe, tokens: int, blocks: int, rounds: int) -> dict:
    """The median time of a step with all blocks but the last in checkpoints, its peak, loss and gradients."""
    adaptation = attach(base, recipe, seed=1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(adaptation):
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    length = 128
    ids = torch.randint(3, base.model.config.vocab_size, (tokens // length, length), generator=draw).tolist()
    examples = [Example(each, each, number) for number, each in enumerate(ids)]
    options = MemoryOptions(checkpoints=blocks - 1, small_buffers=True)
    learner = Learner(adaptation, recipe, examples, Collator(recipe.context_length, 0), silent, options)
    try:
        (micro_batch,) = learner.row_losses.limit.cut(outlines(examples))
        times = []
        for number in range(rounds + 2):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            learner.begin_step(0.0)
            learner.accumulate(micro_batch, math.prod((tokens // length, length - 1)))
            if number == 0:
                loss, gradients = float(learner._loss), [each.grad.cpu() for each in learner.parameters]
            learner.finish_step()
            torch.cuda.synchronize()
            times += [1e3 * (time.perf_counter() - begin)]
        assert learner.graphs is not None, "The step was not captured."
        peak = torch.cuda.max_memory_allocated()
        return {"ms": statistics.median(times[2:]), "peak": peak, "loss": loss, "gradients": gradients}
    finally:
        learner.release()
        learner.remove()
        adaptation.detach()
        devices.release_memory(CUDA)


def streamed_hosts(model) -> list[torch.Tensor]:
    """The streamed matrices of all blocks, each once."""
    weights = [weight for weight in model.parameters() if getattr(weight, "is_streamed", False)]
    states = [weight.quant_state.absmax for weight in weights if hasattr(weight, "quant_state")]
    return [*(weight.data for weight in weights), *states]


if __name__ == "__main__":
    main()
