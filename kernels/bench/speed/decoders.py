"""Times a 3B decoder on a GPU, with one short text padded to 4096: dense, drop-in, hoisted, and hoisted in a graph.

    python kernels/bench/speed/decoders.py [--record [FILE]]
    python kernels/bench/speed/decoders.py --tiny              small shapes on the CPU, without a graph, to try it

The model has the shape of Llama-3.2-3B and random bf16 weights, all of them trained. Each of the paper's data sets
gives one text of its mean length, from lengths.json. The gradients of each variant are first compared with those in
fp32 (`models`); then the variants run in turns (`whole_models`).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))

from models import TINY, Case, known_config
from sebp_edge.insight.bench.variants import Variant
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import RowPlan
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.texts.batches import Batch
from speed.whole_models import Benchmark, make_variants

TEXTS = ("Winogrande", "ARC-E", "ARC-C", "HellaSwag", "WikiText-2", "PTB")
# The largest speed-up in the paper, whose code computes no weight gradients.
TARGET = 2.08


def main(arguments: list[str] | None = None) -> None:
    DECODERS.main(__doc__, arguments)


def cases() -> Iterator[Case]:
    for texts in TEXTS:
        yield Case("Llama-3.2-3B", known_config("llama-3.2-3b"), texts, 1, 4096, TARGET)


def tiny_cases() -> Iterator[Case]:
    grouped = LlamaConfig(vocab_size=320, num_key_value_heads=2, **TINY)
    yield Case("tiny Llama", LlamaConfig(vocab_size=320, **TINY), "PTB", 1, 300, target=1.0)
    yield Case("tiny Llama, heads grouped", grouped, "HellaSwag", 1, 601, target=1.0)


def variants_for(model: nn.Module, batch: Batch) -> tuple[Variant, ...]:
    plan = RowPlan.from_labels(batch.labels.cpu())
    return make_variants(Hoisted, ActiveTokens.gather(batch.input_ids.cpu(), plan), batch.input_ids.device)


# A dense step takes a quarter of a second for any text and varies little, so one sample is enough.
DECODERS = Benchmark("decoders", cases, tiny_cases, variants_for, __file__, samples=1, kernel_repeats=1)

if __name__ == "__main__":
    main()
