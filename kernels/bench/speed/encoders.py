"""Times encoders on a GPU, in bf16: dense, drop-in, hoisted, and hoisted in a captured graph.

    python kernels/bench/speed/encoders.py [--record [FILE]]
    python kernels/bench/speed/encoders.py --tiny              small shapes on the CPU, without a graph, to try it

BERT-base and RoBERTa-base have a classification head and random weights, all of them trained; texts are padded to 512.
Text lengths are drawn from lengths.json, in BERT's tokens for both models. The gradients of each variant are first
compared, without dropout, with those in fp32 (`models`). Then the variants run in turns (`whole_models`), with dropout
0.1.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from transformers import BertConfig, RobertaConfig

sys.path.append(str(Path(__file__).parents[1]))

from models import TINY, Case
from sebp_edge.insight.bench.variants import Variant
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.texts.batches import Batch
from speed.whole_models import Benchmark, make_variants

TASKS = ("SST-2", "MRPC", "RTE", "CoLA", "MNLI")
TARGET = 4.0


def main(arguments: list[str] | None = None) -> None:
    ENCODERS.main(__doc__, arguments)


def cases() -> Iterator[Case]:
    roberta = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    for name, config in (("BERT-base", BertConfig()), ("RoBERTa-base", roberta)):
        for texts in TASKS:
            for batch_size in (32, 64):
                yield Case(name, config, texts, batch_size, 512, TARGET)


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny BERT", BertConfig(vocab_size=320, **TINY), "CoLA", 5, 96, target=1.0)
    yield Case("tiny RoBERTa", RobertaConfig(vocab_size=320, **TINY), "MRPC", 3, 128, target=1.0)


def variants_for(model: nn.Module, batch: Batch) -> tuple[Variant, ...]:
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    with HoistedEncoder(model) as hoisted:
        return make_variants(HoistedEncoder, hoisted.tokens(inputs), batch.input_ids.device)


ENCODERS = Benchmark("encoders", cases, tiny_cases, variants_for, __file__, samples=5, kernel_repeats=2)

if __name__ == "__main__":
    main()
