"""Whole models run in four ways, in turns: dense, in the drop-in, hoisted, and hoisted in a captured graph.

    forward     the loss; a graph's is without what a backward pass would need
    backward    what the gradients take longer than that, of which a graph has no part of its own
    step        gradients and AdamW

Each is timed until the GPU is done ("wall"), and as the sum of its kernels' times ("GPU"). Hoisted ways begin with the
real tokens laid out, as a collator leaves them: eager on the GPU, for the graph on the host.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import evidence
from graph_time import milliseconds_in_kernels
from models import Case, gradient_errors, make_batch, make_model
from sebp_edge.insight.bench.timer import peak_bytes, running, seconds
from sebp_edge.insight.bench.ways import DENSE, DROP_IN, EagerStep, Mark, Step, Way, trained
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.texts.batches import Batch
from sebp_edge.training.captured_gradients import CapturedGradients

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
    "sebp_edge/insight/bench",
    *(f"kernels/bench/{file}" for file in ("graph_time.py", "lengths.json", "models.py", "whole_models.py")),
)


@dataclass(frozen=True, kw_only=True)
class Replayed(Way):
    """A way whose forward and backward pass are one.

    Attributes:
        add: adds a batch's gradients, with what `attach` gave; returns the loss.
    """

    add: Callable[[object], Tensor]

    def step(self, handle, model: nn.Module, batch: Batch) -> Step:
        return ReplayedStep(trained(model), lambda: self.loss(handle, batch), lambda: self.add(handle))


class ReplayedStep(EagerStep):
    """The step of a loop of one's own whose forward and backward pass are one replay."""

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
    """Cases that one command measures.

    Attributes:
        name: of its results.
        ways_for: the ways to make a step of a batch.
        file: its own, one of the sources of its figures.
        samples: how often each part is timed in a round.
        kernel_repeats: how often its kernels' times are summed.
    """

    name: str
    cases: Callable[[], Iterable[Case]]
    tiny_cases: Callable[[], Iterable[Case]]
    ways_for: Callable[[nn.Module, Batch], tuple[Way, ...]]
    file: str
    samples: int
    kernel_repeats: int

    def main(self, description: str, arguments: list[str] | None) -> None:
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--tiny", action="store_true")
        evidence.add_record_option(parser)
        options = parser.parse_args(arguments)
        if options.tiny and options.record:
            parser.error("tiny shapes are no evidence; record without --tiny.")
        device = torch.device("cpu" if options.tiny else "cuda")
        print(
            f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, bf16; ms"
        )
        titles = ("forward", "backward", "step", "forward, GPU", "backward, GPU", "step, GPU")
        sizes = zip(titles, COLUMNS.values(), strict=True)
        print(f"{'':26}{''.join(f'{title:>{size}}' for title, size in sizes)}{'GiB':>7}{'error':>9}")
        rows = []
        for case in self.tiny_cases() if options.tiny else self.cases():
            found = list(self.measure(case, device))
            show(case, found)
            rows += found
        if options.record:
            evidence.record(self.name, (*SOURCES, self.file), rows, options.record)

    def measure(self, case: Case, device: torch.device) -> Iterator[dict]:
        """One row of figures for each way; times in milliseconds, on a CPU without those of a GPU."""
        torch.manual_seed(0)
        model, (batch, tokens) = make_model(case.config, device), make_batch(case, device)
        ways = self.ways_for(model, batch)
        errors = gradient_errors(model, batch, ways)
        turns = self._time_in_turns(model.train(), batch, ways)
        about = {key: value for key, value in asdict(case).items() if key != "config"}
        for way in ways:
            timed = [turn[way.name] for turn in turns]
            wall = {part: statistics.median([ms for one in timed for ms in one.wall[part]]) for part in PARTS}
            yield about | {
                "tokens": tokens,
                "way": way.name,
                **_times(wall, ""),
                **_times(timed[-1].in_kernels, "gpu_"),
                "peak_gib": max(one.peak for one in timed) / 2**30,
                "gradient_error": errors[way.name],
            }

    def _time_in_turns(self, model: nn.Module, batch: Batch, ways: tuple[Way, ...]) -> list[dict[str, "Timed"]]:
        """By the ways' names, what each turn shows; only the last one looks at single kernels."""
        repeats = [0] * (ROUNDS - 1) + [self.kernel_repeats]
        return [{way.name: timed_way(model, way, batch, self.samples, each) for way in ways} for each in repeats]


def ways_with(
    hoist: Callable[[nn.Module], AbstractContextManager], tokens: ActiveTokens, device: torch.device
) -> tuple[Way, ...]:
    """Dense, drop-in and hoisted; in a graph only where there is a GPU.

    Args:
        hoist: makes a model's hoisted handle.
        tokens: the batch's, on the host.
        device: the model's.
    """
    on_device = tokens.to(device)
    eager = Way("hoisted", hoist, lambda hoisted, _: hoisted.row_losses(on_device).mean())
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
    """What is timed of a step."""

    def gradients() -> None:
        step.zero_grad()
        step.gradients()

    def whole() -> None:
        step.zero_grad()
        step(lambda part: None)

    return dict(zip(PARTS, (step.loss, gradients, whole), strict=True))


class Timed(NamedTuple):
    """What one turn shows of a way.

    Attributes:
        wall: milliseconds of each part until the GPU is done, several times.
        in_kernels: the summed times of each part's kernels, in milliseconds; None on a CPU, or where not asked for.
        peak: the most bytes that were held on a GPU, captures and the first step included; 0 on a CPU.
    """

    wall: dict[str, list[float]]
    in_kernels: dict[str, float] | None
    peak: int


def timed_way(model: nn.Module, way: Way, batch: Batch, samples: int, kernel_repeats: int) -> Timed:
    """One turn of a way.

    Args:
        samples: how often each part is timed.
        kernel_repeats: how often its kernels' times are summed; 0 for not at all.
    """
    device = batch.input_ids.device
    with running(model, batch, way) as step:
        parts = parts_of(step)
        for run in parts.values():
            run()
        wall = {part: [1e3 * seconds(run, device) for _ in range(samples)] for part, run in parts.items()}
        peak = peak_bytes(device) or 0
        # Its kernels run on another stream, which waits for nothing; the wall times end with the device done.
        sums_kernels = device.type == "cuda" and kernel_repeats > 0
        in_kernels = milliseconds_in_kernels(parts, repeats=kernel_repeats) if sums_kernels else None
    return Timed(wall, in_kernels, peak)


def _times(parts: dict[str, float] | None, prefix: str) -> dict[str, float | None]:
    if parts is None:
        return {f"{prefix}{name}_ms": None for name in ("forward", "backward", "step")}
    times = {"forward": parts["forward"], "backward": parts["gradients"] - parts["forward"], "step": parts["step"]}
    return {f"{prefix}{name}_ms": milliseconds for name, milliseconds in times.items()}


def show(case: Case, rows: list[dict]) -> None:
    text = rows[0]["tokens"] / case.batch_size / case.context_length
    print(f"{case.model}, {case.texts}, {case.batch_size} x {case.context_length}, {text:.1%} of it text")
    for row in rows:
        times = "".join(f"{'-' if row[name] is None else f'{row[name]:.2f}':>{size}}" for name, size in COLUMNS.items())
        print(f"    {row['way']:22}{times}{row['peak_gib']:>7.2f}{row['gradient_error']:>9.1e}")
    dense, *ours = rows
    for row in ours:
        ratios = {name: dense[name] / row[name] for name in COLUMNS if row[name]}
        said = ", ".join(f"{_spoken(name)} {ratio:.2f}x" for name, ratio in ratios.items())
        target = "gpu_backward_ms" if "gpu_backward_ms" in ratios else "backward_ms"
        reached = "reached" if ratios[target] >= case.target else "missed"
        verdict = f"; {_spoken(target)} {case.target}x {reached}"
        print(f"    dense / {row['way']}: {said}{verdict if row['way'].startswith('hoisted') else ''}", flush=True)


def _spoken(column: str) -> str:
    return column.removesuffix("_ms").replace("gpu_", "GPU ")
