"""Encoders on a GPU, in bf16: dense, in the drop-in, hoisted, and hoisted in a captured graph.

    python kernels/bench/encoders.py [--record [FILE]]
    python kernels/bench/encoders.py --tiny              small shapes on the CPU, without a graph, to try it

BERT-base and RoBERTa-base with a classification head, padded to 512, all weights trained, random; texts' lengths are
drawn from lengths.json, BERT's tokens for both. First, without dropout, each arm's gradients are held against those of
an fp32 copy that sees no padding beyond the longest text. Then the arms run in turns, with dropout of 0.1.

    forward     the loss; a graph's is without what a backward pass would need
    backward    what the gradients take longer than that, of which a graph has no part of its own
    step        gradients and AdamW

Each is timed until the GPU is done ("wall"), and as the sum of its kernels' times ("GPU"). Hoisted arms begin with the
real tokens laid out, as a collator leaves them: eager on the GPU, for the graph on the host.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers import BertConfig, RobertaConfig

import evidence
from graph_time import milliseconds_in_kernels
from models import TINY, Case, gradient_errors, make_batch, make_model
from sebp_edge.insight.bench.ways import DENSE, DROP_IN, Step, Way
from sebp_edge.models.machine import synchronize
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.texts.batches import Batch
from sebp_edge.training.own_loop import CapturedGradients

TASKS = ("SST-2", "MRPC", "RTE", "CoLA", "MNLI")
TARGET = 4.0
ROUNDS, SAMPLES = 2, 7
PARTS = ("forward", "gradients", "step")


@dataclass(frozen=True, kw_only=True)
class Replayed(Way):
    """A way whose forward and backward pass are one.

    Attributes:
        add: adds a batch's gradients, with what `attach` gave, and gives the loss.
    """

    add: Callable[[object], Tensor]

    def step(self, handle, model: nn.Module, batch: Batch) -> Step:
        return _Replay(lambda: self.add(handle), model.zero_grad)


@dataclass(frozen=True)
class _Replay:
    """The part of a step that is one replay."""

    gradients: Callable[[], Tensor]
    release: Callable[[], None]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("tiny shapes are no evidence; record without --tiny.")
    device = torch.device("cpu" if options.tiny else "cuda")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, bf16; ms")
    print(
        f"{'':26}{'forward':>9}{'backward':>10}{'step':>9}{'backward, GPU':>15}{'step, GPU':>11}{'GiB':>7}{'error':>9}"
    )
    rows = []
    for case in tiny_cases() if options.tiny else cases():
        found = list(measure(case, device))
        show(case, found)
        rows += found
    if options.record:
        names = ("encoders.py", "graph_time.py", "lengths.json", "models.py")
        sources = [*evidence.STEP, "sebp_edge/insight/bench", *(f"kernels/bench/{name}" for name in names)]
        evidence.record("encoders", sources, rows, options.record)


def cases() -> Iterator[Case]:
    roberta = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    for name, config in (("BERT-base", BertConfig()), ("RoBERTa-base", roberta)):
        for texts in TASKS:
            for batch_size in (32, 64):
                yield Case(name, config, texts, batch_size, 512, TARGET)


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny BERT", BertConfig(vocab_size=320, **TINY), "CoLA", 5, 96, target=1.0)
    yield Case("tiny RoBERTa", RobertaConfig(vocab_size=320, **TINY), "MRPC", 3, 128, target=1.0)


def measure(case: Case, device: torch.device) -> Iterator[dict]:
    """One row of figures for each arm; times in milliseconds, on a CPU without those of a GPU."""
    torch.manual_seed(0)
    model, (batch, tokens) = make_model(case.config, device), make_batch(case, device)
    arms = arms_for(model, batch)
    # Two numbers of a head's bias, say, are off by chance by more than twice as much as another way's.
    errors = gradient_errors(model, batch, arms, of_own=0.02)
    samples, peaks = time_in_turns(model.train(), batch, arms)
    about = {key: value for key, value in asdict(case).items() if key != "config"}
    for arm in arms:
        wall = {part: statistics.median(samples[arm.name][part]) for part in PARTS}
        on_gpu = dict.fromkeys(PARTS) if device.type == "cpu" else milliseconds_on_gpu(model, arm, batch)
        yield about | {
            "tokens": tokens,
            "way": arm.name,
            "forward_ms": wall["forward"],
            "backward_ms": wall["gradients"] - wall["forward"],
            "step_ms": wall["step"],
            "gpu_backward_ms": None if device.type == "cpu" else on_gpu["gradients"] - on_gpu["forward"],
            "gpu_step_ms": on_gpu["step"],
            "peak_gib": peaks[arm.name] / 2**30,
            "gradient_error": errors[arm.name],
        }


def show(case: Case, rows: list[dict]) -> None:
    text = rows[0]["tokens"] / case.batch_size / case.context_length
    print(f"{case.model}, {case.texts}, {case.batch_size} x {case.context_length}, {text:.1%} of it text")
    for row in rows:
        columns = (("forward_ms", 9), ("backward_ms", 10), ("step_ms", 9), ("gpu_backward_ms", 15), ("gpu_step_ms", 11))
        times = "".join(f"{'-' if row[name] is None else f'{row[name]:.2f}':>{size}}" for name, size in columns)
        print(f"    {row['way']:22}{times}{row['peak_gib']:>7.2f}{row['gradient_error']:>9.1e}")
    dense, *ours = rows
    for row in ours:
        ratios = {name: dense[name] / row[name] for name in dense if name.endswith("_ms") and row[name]}
        said = ", ".join(f"{name.removesuffix('_ms').replace('_', ' ')} {ratio:.2f}x" for name, ratio in ratios.items())
        target = "gpu_backward_ms" if "gpu_backward_ms" in ratios else "backward_ms"
        reached = "reached" if ratios[target] >= case.target else "missed"
        verdict = f"; {target.removesuffix('_ms').replace('_', ' ')} {case.target}x {reached}"
        print(f"    dense / {row['way']}: {said}{verdict if row['way'].startswith('hoisted') else ''}", flush=True)


def arms_for(model: nn.Module, batch: Batch) -> tuple[Way, ...]:
    """The ways to run `model` on this batch; the last one only where there is a GPU."""
    with HoistedEncoder(model) as hoisted:
        tokens = hoisted.tokens(
            {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
        )
    on_device = tokens.to(batch.input_ids.device)
    eager = Way("hoisted", HoistedEncoder, lambda hoisted, _: hoisted.row_losses(on_device).mean())
    in_graph = Replayed(
        "hoisted, in a graph",
        captured,
        lambda gradients, _: gradients.losses(tokens).mean(),
        add=lambda gradients: gradients.add(tokens),
    )
    return (DENSE, DROP_IN, eager, in_graph) if batch.input_ids.is_cuda else (DENSE, DROP_IN, eager)


@contextmanager
def captured(model: nn.Module) -> Iterator[CapturedGradients]:
    with HoistedEncoder(model) as hoisted:
        yield CapturedGradients(hoisted)


@contextmanager
def parts_of(model: nn.Module, arm: Way, batch: Batch) -> Iterator[dict[str, Callable[[], object]]]:
    """What is timed of an arm, each made ready by one call."""
    device = batch.input_ids.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    with arm.attach(model) as handle:
        of_arm = arm.step(handle, model, batch)

        def gradients() -> None:
            model.zero_grad()
            of_arm.gradients()

        def step() -> None:
            gradients()
            optimizer.step()

        parts = dict(zip(PARTS, (lambda: arm.loss(handle, batch), gradients, step), strict=True))
        for part in parts.values():
            part()
        yield parts
    model.zero_grad()


def time_in_turns(model: nn.Module, batch: Batch, arms: tuple[Way, ...]) -> tuple[dict[str, dict], dict[str, int]]:
    """Milliseconds of each part, and the most bytes held on a GPU, preparations included; by the arms' names."""
    samples = {arm.name: {part: [] for part in PARTS} for arm in arms}
    peaks = dict.fromkeys(samples, 0)
    for _ in range(ROUNDS):
        for arm in arms:
            with peak_of(batch.input_ids.device, peaks, arm.name):
                # In a call of its own: what one arm leaves in variables would be in the next one's peak.
                for part, found in milliseconds_until_done(model, arm, batch).items():
                    samples[arm.name][part] += found
    return samples, peaks


@contextmanager
def peak_of(device: torch.device, peaks: dict[str, int], name: str) -> Iterator[None]:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device))


def milliseconds_until_done(model: nn.Module, arm: Way, batch: Batch) -> dict[str, list[float]]:
    """Each part's time until the GPU is done, several times."""

    def timed(run: Callable[[], object]) -> float:
        synchronize(batch.input_ids.device)
        begin = time.perf_counter()
        run()
        synchronize(batch.input_ids.device)
        return 1e3 * (time.perf_counter() - begin)

    with parts_of(model, arm, batch) as parts:
        return {part: [timed(run) for _ in range(SAMPLES)] for part, run in parts.items()}


def milliseconds_on_gpu(model: nn.Module, arm: Way, batch: Batch) -> dict[str, float]:
    """The summed times of each part's kernels."""
    with parts_of(model, arm, batch) as parts:
        # They are run on another stream there.
        torch.cuda.synchronize()
        return {part: milliseconds_in_kernels(run, repeats=3) for part, run in parts.items()}


if __name__ == "__main__":
    main()
