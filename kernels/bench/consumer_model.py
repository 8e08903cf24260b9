"""A model, not a measurement: how long a LoRA step should take on cards that nobody has measured it on.

    python kernels/bench/consumer_model.py [--measured TOKENS=MS ... --on GPU] [--csv FILE]

For each part of a step the FLOPs and the bytes to and from memory are counted from the model's shape; the part takes
max(bytes / bandwidth, FLOPs / rate), and each layer besides a fixed time: what small kernels take however little they
compute, and what there is between them. That one figure is fitted: to a captured step of 80 tokens on an H100. Steps of
212 to 3727 tokens there check the model.

A peer without padding is counted with our bytes and FLOPs, which favours it, and is never faster than its host launches
its kernels: 100 to 180 ms for 28 layers, as measured beside an H100 and an H200. Dynamic padding computes each text as
long as the longest. A step that does not fit into a card's memory is cut into micro-batches: each reads the weights
again, and launches again. A base in 4 bits is dequantised to bf16 in memory in both passes, as `lora_linear` and
bitsandbytes do; its head and embedding stay in bf16. The host of a card is taken to be as fast as the measured ones.

Shapes: T tokens, K inputs, M outputs, R rank, D hidden, V vocabulary.
"""

import argparse
import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peer_work import lengths as text_lengths
from peer_work import shape_config

RESULTS = Path(__file__).with_name("results") / "consumer-model.csv"
RANK, BATCHES = 16, (1, 4, 16, 64)
BF16, FP32 = 2, 4
# Bytes of a weight in NF4, in blocks of 64 with quantised scales (Dettmers et al. 2023).
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# The chunk of logits of linear_cross_entropy.
CHUNK = 2**26
# Norm of the gradients, clipping, AdamW on parameter, gradient and two moments, zeroing; adding up comes before.
UPDATE_BYTES = 44 + 12
# Milliseconds of our captured step on an H100, as recorded in results/peers.csv.
MEASURED = {80: 10.96, 212: 12.30, 836: 26.54, 3727: 98.44}
# What a peer's host takes to launch a step of 28 layers, in seconds: about the quickest and the slowest that was seen.
HOST, HOST_LAYERS = (0.100, 0.180), 28
# Of a process outside of torch's allocator (0.9 GB on an H100, guessed to be less here), and of the rest of a desktop.
CONTEXT_BYTES = 0.65e9 + 0.5e9
# Activations of one token in a 3B step, from the peaks of its captured buckets: (13.63 - 7.16) GB over 3,616 tokens.
KEPT_BYTES_3B = 6.47e9 / 3616


class Card(NamedTuple):
    """A GPU: bytes of memory, bytes a second, FLOP/s of dense bf16 products that are summed in fp32."""

    name: str
    memory: float
    bandwidth: float
    rate: float


# Of the data sheet's, what an H100 was measured to reach: 3.0 of 3.35 TB/s, 765 of 989 TFLOP/s.
REACHED_BANDWIDTH, REACHED_RATE = 3.0 / 3.35, 765 / 989
# Measured; the H200 as well.
H100, H200 = Card("H100", 80e9, 3.0e12, 765e12), Card("H200", 141e9, 4.3e12, 788e12)
# As NVIDIA states them for dense bf16 at boost clock; the rates with fp16 sums are twice these, and no use here.
CARDS = [
    Card(name, memory, REACHED_BANDWIDTH * bandwidth, REACHED_RATE * rate)
    for name, memory, bandwidth, rate in (
        ("RTX 4060", 8e9, 272e9, 30.2e12),
        ("RTX 3090", 24e9, 936e9, 71e12),
        ("RTX 4090", 24e9, 1008e9, 165.2e12),
    )
]


@dataclass(frozen=True)
class Shape:
    """A decoder with a gated MLP and an embedding that is its head too."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    head_size: int

    @property
    def projections(self) -> list[tuple[int, list[int]]]:
        """A layer's groups that read one input: its size, and the sizes of what is made of it."""
        queries, keys = self.heads * self.head_size, self.groups * self.head_size
        return [
            (self.hidden, [queries, keys, keys]),
            (queries, [self.hidden]),
            (self.hidden, [self.intermediate, self.intermediate]),
            (self.intermediate, [self.hidden]),
        ]

    @property
    def linear_weights(self) -> int:
        return self.layers * sum(inputs * sum(outputs) for inputs, outputs in self.projections)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def adapter_weights(self) -> int:
        return self.layers * RANK * sum(inputs + size for inputs, outputs in self.projections for size in outputs)

    @property
    def kept_bytes(self) -> float:
        """Of a token's activations, as the measured 3B step's, by the sizes of what a layer keeps."""
        return KEPT_BYTES_3B * self._kept_sizes / LLAMA_3B._kept_sizes

    @property
    def _kept_sizes(self) -> int:
        return self.layers * sum(inputs + sum(outputs) for inputs, outputs in self.projections)


def shape_of(title: str, name: str) -> Shape:
    """The shape of a model that is known by name."""
    config = shape_config(name)
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return Shape(title, *sizes, *heads)


LLAMA_3B = shape_of("Llama-3.2-3B", "llama-3.2-3b")
SHAPES = [LLAMA_3B, shape_of("Qwen3-0.6B", "qwen3-0.6b"), shape_of("SmolLM2-135M", "smollm2-135m")]


class Work(NamedTuple):
    """FLOPs of matrix products, and bytes to and from memory."""

    flops: float
    bytes: float

    def seconds(self, card: Card) -> float:
        return max(self.flops / card.rate, self.bytes / card.bandwidth)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", nargs="+", type=pair, metavar="TOKENS=MS", help="captured 3B steps on --on")
    parser.add_argument("--on", choices=["H100", "H200"], default="H100")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    tokens = [sum(text_lengths(loss_share=1.0)[:texts]) for texts in BATCHES]
    measured = dict(options.measured or MEASURED)
    if options.on != "H100" and not options.measured:
        parser.error("only the H100's figures are built in; give the others with --measured.")
    if min(tokens) not in measured or not measured.keys() <= set(tokens):
        parser.error(f"steps of {', '.join(map(str, tokens))} tokens are modelled; {min(tokens)} must be measured.")
    checked = {"H100": H100, "H200": H200}[options.on]
    fixed = fitted(checked, measured[min(tokens)] / 1e3)
    check(checked, measured, fixed)
    rows = [row for shape in SHAPES for card in (checked, *CARDS) for row in predict(shape, card, fixed)]
    show(rows)
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)


def pair(text: str) -> tuple[int, float]:
    tokens, _, milliseconds = text.partition("=")
    return int(tokens), float(milliseconds)


def fitted(card: Card, seconds: float) -> float:
    """Seconds that each layer takes besides what is counted, from a captured 3B step of one text."""
    return (seconds - counted(LLAMA_3B, text_lengths(loss_share=1.0)[:1], card, BF16)) / LLAMA_3B.layers


def check(card: Card, measured: dict[int, float], fixed: float) -> None:
    print(f"The model held against captured 3B steps on an {card.name}, ms; {1e6 * fixed:.0f} us a layer are fitted")
    print(f"{'tokens':>8}{'counted':>10}{'modelled':>10}{'measured':>10}{'modelled / measured':>21}")
    for texts in BATCHES:
        lengths = text_lengths(loss_share=1.0)[:texts]
        if sum(lengths) not in measured:
            continue
        count, found = 1e3 * counted(LLAMA_3B, lengths, card, BF16), measured[sum(lengths)]
        whole = count + 1e3 * fixed * LLAMA_3B.layers
        note = "  (fitted)" if texts == BATCHES[0] else ""
        print(f"{sum(lengths):>8}{count:>10.1f}{whole:>10.1f}{found:>10.1f}{whole / found:>21.2f}{note}")


def predict(shape: Shape, card: Card, fixed: float) -> Iterable[dict]:
    """One row for each batch: our step's milliseconds, and the peers' in units of it with a quick and a slow host."""
    weight_bytes = next((each for each in (BF16, NF4) if room(shape, card, each) > 256 * shape.kept_bytes), None)
    if weight_bytes is None:
        raise ValueError(f"{shape.name} does not fit into the memory of the {card.name}, not even in 4 bits.")
    layers = fixed * shape.layers
    for texts in BATCHES:
        lengths = text_lengths(loss_share=1.0)[:texts]
        padded = [max(lengths)] * texts
        # Peers keep more of a token than we do; here as much, which favours them.
        ours, theirs = (
            math.ceil(sum(each) * shape.kept_bytes / room(shape, card, weight_bytes)) for each in (lengths, padded)
        )
        on_gpu = counted(shape, lengths, card, weight_bytes, ours) + ours * layers
        with_padding = counted(shape, padded, card, weight_bytes, theirs) + theirs * layers
        hosts = [host * shape.layers / HOST_LAYERS for host in HOST]
        yield {
            "model": shape.name,
            "card": card.name,
            "base": "bf16" if weight_bytes == BF16 else "4 bits",
            "tokens": sum(lengths),
            "micro_batches": ours,
            "counted_ms": 1e3 * (on_gpu - ours * layers),
            "ours_ms": 1e3 * on_gpu,
            "dynamic_gpu_ms": 1e3 * with_padding,
            **{
                f"{peer}_over_ours_{name}_host": max(gpu, times * host) / on_gpu
                for peer, gpu, times in (("packed", on_gpu, ours), ("dynamic", with_padding, theirs))
                for name, host in zip(("quick", "slow"), hosts, strict=True)
            },
        }


def room(shape: Shape, card: Card, weight_bytes: float) -> float:
    """Bytes that are left for activations; weights, adapters with gradients and moments and a chunk of logits taken."""
    head = BF16 * shape.head_weights + 2 * BF16 * CHUNK
    return card.memory - CONTEXT_BYTES - head - weight_bytes * shape.linear_weights - 4 * FP32 * shape.adapter_weights


def show(rows: list[dict]) -> None:
    print("\nModelled, not measured: our captured step, and how much longer others take (quick host to slow host)")
    columns = f"{'model':14}{'card':10}{'base':>7}{'tokens':>8}{'micro-batches':>15}{'ours, ms':>10}"
    print(f"{columns}{'without padding':>20}{'dynamic padding':>20}")
    for row in rows:
        packed, dynamic = (
            f"{row[f'{peer}_over_ours_quick_host']:.1f}x to {row[f'{peer}_over_ours_slow_host']:.1f}x"
            for peer in ("packed", "dynamic")
        )
        print(
            f"{row['model']:14}{row['card']:10}{row['base']:>7}{row['tokens']:>8}{row['micro_batches']:>15}"
            f"{row['ours_ms']:>10.1f}{packed:>20}{dynamic:>20}"
        )


# ---------------------------------------------------------------------------------------------------------- counting


def counted(shape: Shape, lengths: list[int], card: Card, weight_bytes: float, micro_batches: int = 1) -> float:
    """Seconds of all parts of a step on these texts, in micro-batches that are equally full."""
    tokens, squares = (sum(length**power for length in lengths) / micro_batches for power in (1, 2))
    works = parts(shape, tokens, squares, weight_bytes)
    return micro_batches * sum(work.seconds(card) for work in works) + update(shape).seconds(card)


def parts(shape: Shape, tokens: float, squares: float, weight_bytes: float) -> list[Work]:
    """Forward and backward passes of all layers and the head; `squares`: the texts' lengths squared and summed."""
    works = []
    for layer in range(shape.layers):
        for number, (inputs, outputs) in enumerate(shape.projections):
            # Under the first layer's q, k and v nothing learns.
            works += linear(tokens, inputs, outputs, weight_bytes, input_gradient=layer > 0 or number > 0)
        works += [*attention(shape, tokens, squares), *small(shape, tokens)]
    return [*works, *head(shape, tokens)]


def linear(
    tokens: float, inputs: int, outputs: list[int], weight_bytes: float, *, input_gradient: bool
) -> tuple[Work, Work]:
    """Projections of one input with their adapters: Y = X Wᵀ + X Aᵀ Bᵀ; then dX, dA and dB."""
    wide, rank = sum(outputs), RANK * len(outputs)
    product, into_rank, out_of_rank = (2 * tokens * size for size in (inputs * wide, inputs * rank, RANK * wide))
    weight = inputs * wide * (weight_bytes if weight_bytes == BF16 else weight_bytes + 2 * BF16)
    adapters = FP32 * (rank * inputs + RANK * wide)
    rows = BF16 * tokens * (inputs + wide)
    forward = Work(product + into_rank + out_of_rank, weight + adapters + rows)
    backward = Work(into_rank + 2 * out_of_rank, 2 * adapters + rows)  # dA; dY B and dB
    if input_gradient:
        backward = Work(backward.flops + product + into_rank, backward.bytes + weight + BF16 * tokens * inputs)
    return forward, backward


def attention(shape: Shape, tokens: float, squares: float) -> tuple[Work, Work]:
    """Causal, nothing kept of the scores (Dao et al. 2022): two products, of which half is computed; then five."""
    queries, keys = shape.heads * shape.head_size, shape.groups * shape.head_size
    product = 2 * squares * queries / 2
    rows = BF16 * tokens * (queries + keys)
    return Work(2 * product, 2 * rows), Work(5 * product, 4 * rows)


def small(shape: Shape, tokens: float) -> tuple[Work, Work]:
    """Two norms, two sums, rotary embedding, gate: each reads and writes its rows; some are made again backward."""
    hidden, rotated = shape.hidden, (shape.heads + shape.groups) * shape.head_size
    norms, sums, rotary, gate = 4 * hidden, 6 * hidden, 2 * rotated, 3 * shape.intermediate
    backward = 6 * hidden + sums + rotary + 5 * shape.intermediate + norms + gate
    return Work(0, BF16 * tokens * (norms + sums + rotary + gate)), Work(0, BF16 * tokens * backward)


def head(shape: Shape, tokens: float) -> tuple[Work, Work]:
    """Logits and their gradient, chunk by chunk: each is written and read, and each chunk reads the weights."""
    chunks = math.ceil(tokens * shape.vocabulary / CHUNK)
    rows = BF16 * tokens * (shape.hidden + 2 * shape.vocabulary)
    product = Work(2 * tokens * shape.head_weights, chunks * BF16 * shape.head_weights + rows)
    return product, product


def update(shape: Shape) -> Work:
    return Work(0, UPDATE_BYTES * shape.adapter_weights)


if __name__ == "__main__":
    main()
