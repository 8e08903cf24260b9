"""Times whole models in four variants, in turns: dense, drop-in, hoisted, and hoisted in a captured graph.

    python kernels/bench/speed/whole_models.py encoders|decoders [--record [FILE]]     on a GPU, in bf16
    python kernels/bench/speed/whole_models.py encoders|decoders --tiny                small shapes on the CPU

encoders    BERT-base and RoBERTa-base with a classification head; texts padded to 512, their lengths drawn from
            lengths.json in BERT's tokens, with dropout 0.1
decoders    the shape of Llama-3.2-3B; one text of the mean length of each of the paper's data sets, padded to 4096

Weights are random and all trained. The gradients of each variant are first compared, without dropout, with those in
fp32 (`models`). Then these are timed:

    forward     the loss; a graph's forward pass keeps nothing for a backward pass
    backward    the time of the gradients minus that of the forward pass; a graph has no backward pass of its own
    step        gradients and AdamW

Each is timed until the GPU is done ("wall"), and as the sum of its kernels' times ("GPU"). Hoisted variants start from
the real tokens, laid out as a collator leaves them: on the GPU for the eager variant, on the host for the graph.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, LlamaConfig, RobertaConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import TINY, Case, gradient_errors, known_config, make_batch, make_model
from sebp_edge.research.bench.timer import peak_bytes, running, seconds
from sebp_edge.research.bench.variants import DENSE, DROP_IN, EagerStep, Mark, Step, Variant, trained
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.rows.row_plan import RowPlan
from sebp_edge.texts.batches import Batch
from sebp_edge.training.captured_gradients import CapturedGradients
from speed.graph_time import milliseconds_in_kernels

GLUE = ("SST-2", "MRPC", "RTE", "CoLA", "MNLI")
TEXTS = ("Winogrande", "ARC-E", "ARC-C", "HellaSwag", "WikiText-2", "PTB")
# The speed-ups that are aimed at; that of decoders is the paper's largest, whose code computes no weight gradients.
OF_ENCODERS, OF_DECODERS = 4.0, 2.08
ROUNDS = 2
PARTS = ("forward", "gradients", "step")
COLUMNS = {
    "forward_ms": 9,
    "backward_ms": 10,
    "step_ms": 9,
    "gpu_forward_ms": 14,
    "gpu_backward_ms": 15,
    "gpu_step_ms": 11,
}
SOURCES = (
    *evidence.STEP,
    "sebp_edge/research/bench",
    *(
        f"kernels/bench/{file}"
        for file in ("speed/graph_time.py", "lengths.json", "models.py", "speed/whole_models.py")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Replayed(Variant):
    """A variant whose forward and backward pass are one replay.

    Attributes:
        add: takes what `attach` yields, adds a batch's gradients, and returns the loss.
    """

    add: Callable[[object], Tensor]

    def step(self, handle, model: nn.Module, batch: Batch) -> Step:
        return ReplayedStep(trained(model), lambda: self.loss(handle, batch), lambda: self.add(handle))


class ReplayedStep(EagerStep):
    """The step of a user's own training loop whose forward and backward pass are one replay."""

    def __init__(self, parameters: list[nn.Parameter], loss: Callable[[], Tensor], add: Callable[[], Tensor]):
        super().__init__(parameters, loss)
        self._add = add

    def gradients(self) -> Tensor:
        return self._add()

    def __call__(self, mark: Mark) -> None:
        self.gradients()
        mark("forward and backward")
        self.update()
        mark("update")


@dataclass(frozen=True)
class Benchmark:
    """The models of a kind, and how they are measured.

    Attributes:
        cases, tiny_cases: what it measures on a GPU, and with --tiny on the CPU.
        variants_for: the variants of a step of a batch.
        samples: how often each part is timed in a round.
        kernel_repeats: number of calls over which kernel times are averaged.
    """

    cases: Callable[[], Iterable[Case]]
    tiny_cases: Callable[[], Iterable[Case]]
    variants_for: Callable[[nn.Module, Batch], tuple[Variant, ...]]
    samples: int
    kernel_repeats: int

    def measure(self, case: Case, device: torch.device) -> Iterator[dict]:
        """One row of figures per variant, with times in milliseconds; GPU times are None on a CPU."""
        torch.manual_seed(0)
        model, (batch, tokens) = make_model(case.config, device), make_batch(case, device)
        variants = self.variants_for(model, batch)
        errors = gradient_errors(model, batch, variants)
        turns = self._time_in_turns(model.train(), batch, variants)
        about = {key: value for key, value in asdict(case).items() if key != "config"}
        for variant in variants:
            timed = [turn[variant.name] for turn in turns]
            wall = {part: statistics.median([ms for one in timed for ms in one.wall[part]]) for part in PARTS}
            yield about | {
                "tokens": tokens,
                "variant": variant.name,
                **_times(wall, ""),
                **_times(timed[-1].in_kernels, "gpu_"),
                "peak_gib": max(one.peak for one in timed) / 2**30,
                "gradient_error": errors[variant.name],
            }

    def _time_in_turns(
        self, model: nn.Module, batch: Batch, variants: tuple[Variant, ...]
    ) -> list[dict[str, "TurnTimes"]]:
        """The measurements of each turn, by the names of the variants; only the last turn sums kernel times."""
        repeats = [0] * (ROUNDS - 1) + [self.kernel_repeats]
        return [
            {variant.name: run_turn(model, variant, batch, self.samples, each) for variant in variants}
            for each in repeats
        ]


def make_variants(
    hoist: Callable[[nn.Module], AbstractContextManager], tokens: ActiveTokens, device: torch.device
) -> tuple[Variant, ...]:
    """The dense, drop-in and hoisted variants, and on a GPU the hoisted variant in a graph.

    Args:
        hoist: makes the hoisted handle of a model.
        tokens: the active tokens of the batch, on the host.
        device: the model's device.
    """
    on_device = tokens.to(device)
    eager = Variant("hoisted", hoist, lambda hoisted, _: hoisted.row_losses(on_device).mean())
    if device.type != "cuda":
        return DENSE, DROP_IN, eager

    @contextmanager
    def captured(model: nn.Module) -> Iterator[CapturedGradients]:
        with hoist(model) as hoisted:
            yield CapturedGradients(hoisted)

    in_graph = Replayed(
        "hoisted, in a graph",
        captured,
        lambda gradients, _: gradients.losses(tokens).mean(),
        add=lambda gradients: gradients.add(tokens),
    )
    return DENSE, DROP_IN, eager, in_graph


def parts_of(step: EagerStep) -> dict[str, Callable[[], object]]:
    """The parts of a step that are timed, by name."""

    def gradients() -> None:
        step.zero_grad()
        step.gradients()

    def whole() -> None:
        step.zero_grad()
        step(lambda part: None)

    return dict(zip(PARTS, (step.loss, gradients, whole), strict=True))


class TurnTimes(NamedTuple):
    """The measurements of a variant in one turn.

    Attributes:
        wall: milliseconds of each part until the GPU is done, one per sample.
        in_kernels: summed kernel times of each part, in milliseconds; None on a CPU or if not requested.
        peak: peak bytes of torch's allocator on a GPU, captures and the first step included; 0 on a CPU.
    """

    wall: dict[str, list[float]]
    in_kernels: dict[str, float] | None
    peak: int


def run_turn(model: nn.Module, variant: Variant, batch: Batch, samples: int, kernel_repeats: int) -> TurnTimes:
    """Runs one turn of a variant.

    Args:
        model: on its device.
        variant: the variant to time.
        batch: on the model's device.
        samples: how often each part is timed.
        kernel_repeats: number of calls over which kernel times are averaged; 0 leaves them out.
    """
    device = batch.input_ids.device
    with running(model, batch, variant) as step:
        parts = parts_of(step)
        for run in parts.values():
            run()
        wall = {part: [1e3 * seconds(run, device) for _ in range(samples)] for part, run in parts.items()}
        peak = peak_bytes(device) or 0
        # Kernel times are taken on another stream, which waits for nothing; the device is idle after the wall times.
        sums_kernels = device.type == "cuda" and kernel_repeats > 0
        in_kernels = milliseconds_in_kernels(parts, repeats=kernel_repeats) if sums_kernels else None
    return TurnTimes(wall, in_kernels, peak)


def _times(parts: dict[str, float] | None, prefix: str) -> dict[str, float | None]:
    if parts is None:
        return {f"{prefix}{name}_ms": None for name in ("forward", "backward", "step")}
    times = {"forward": parts["forward"], "backward": parts["gradients"] - parts["forward"], "step": parts["step"]}
    return {f"{prefix}{name}_ms": milliseconds for name, milliseconds in times.items()}


def show(case: Case, rows: list[dict]) -> None:
    text = rows[0]["tokens"] / case.batch_size / case.context_length
    print(f"{case.model}, {case.texts}, {case.batch_size} x {case.context_length}, {text:.1%} text")
    for row in rows:
        times = "".join(f"{'-' if row[name] is None else f'{row[name]:.2f}':>{size}}" for name, size in COLUMNS.items())
        print(f"    {row['variant']:22}{times}{row['peak_gib']:>7.2f}{row['gradient_error']:>9.1e}")
    dense, *ours = rows
    for row in ours:
        ratios = {name: dense[name] / row[name] for name in COLUMNS if row[name]}
        speedups = ", ".join(f"{_column_title(name)} {ratio:.2f}x" for name, ratio in ratios.items())
        target = "gpu_backward_ms" if "gpu_backward_ms" in ratios else "backward_ms"
        reached = "reached" if ratios[target] >= case.target else "missed"
        comparison = f"; target of {case.target}x for {_column_title(target)} {reached}"
        print(
            f"    dense / {row['variant']}: {speedups}{comparison if row['variant'].startswith('hoisted') else ''}",
            flush=True,
        )


def _column_title(column: str) -> str:
    return column.removesuffix("_ms").replace("gpu_", "GPU ")


def encoder_cases() -> Iterator[Case]:
    roberta = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    for name, config in (("BERT-base", BertConfig()), ("RoBERTa-base", roberta)):
        for texts in GLUE:
            for batch_size in (32, 64):
                yield Case(name, config, texts, batch_size, 512, OF_ENCODERS)


def tiny_encoders() -> Iterator[Case]:
    yield Case("tiny BERT", BertConfig(vocab_size=320, **TINY), "CoLA", 5, 96, target=1.0)
    yield Case("tiny RoBERTa", RobertaConfig(vocab_size=320, **TINY), "MRPC", 3, 128, target=1.0)


def encoder_variants(model: nn.Module, batch: Batch) -> tuple[Variant, ...]:
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    with HoistedEncoder(model) as hoisted:
        return make_variants(HoistedEncoder, hoisted.tokens(inputs), batch.input_ids.device)


def decoder_cases() -> Iterator[Case]:
    for texts in TEXTS:
        yield Case("Llama-3.2-3B", known_config("llama-3.2-3b"), texts, 1, 4096, OF_DECODERS)


def tiny_decoders() -> Iterator[Case]:
    grouped = LlamaConfig(vocab_size=320, num_key_value_heads=2, **TINY)
    yield Case("tiny Llama", LlamaConfig(vocab_size=320, **TINY), "PTB", 1, 300, target=1.0)
    yield Case("tiny Llama, heads grouped", grouped, "HellaSwag", 1, 601, target=1.0)


def decoder_variants(model: nn.Module, batch: Batch) -> tuple[Variant, ...]:
    plan = RowPlan.from_labels(batch.labels.cpu())
    return make_variants(Hoisted, ActiveTokens.gather(batch.input_ids.cpu(), plan), batch.input_ids.device)


BENCHMARKS = {
    "encoders": Benchmark(encoder_cases, tiny_encoders, encoder_variants, samples=5, kernel_repeats=2),
    # A dense step takes a quarter of a second for any text and varies little, so one sample is enough.
    "decoders": Benchmark(decoder_cases, tiny_decoders, decoder_variants, samples=1, kernel_repeats=1),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", choices=BENCHMARKS)
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    device, benchmark = torch.device("cpu" if options.tiny else "cuda"), BENCHMARKS[options.models]
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, bf16; ms")
    titles = ("forward", "backward", "step", "forward, GPU", "backward, GPU", "step, GPU")
    sizes = zip(titles, COLUMNS.values(), strict=True)
    print(f"{'':26}{''.join(f'{title:>{size}}' for title, size in sizes)}{'GiB':>7}{'error':>9}")
    rows = []
    for case in benchmark.tiny_cases() if options.tiny else benchmark.cases():
        found = list(benchmark.measure(case, device))
        show(case, found)
        rows += found
    if options.record:
        evidence.record(options.models, SOURCES, rows, options.record)


if __name__ == "__main__":
    main()
