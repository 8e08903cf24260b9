"""Times whole models in four variants, in turns: dense, drop-in, hoisted, and hoisted in a captured graph.

    forward     the loss; a graph's forward pass keeps nothing for a backward pass
    backward    the time of the gradients minus that of the forward pass; a graph has no backward pass of its own
    step        gradients and AdamW

Each is timed until the GPU is done ("wall"), and as the sum of its kernels' times ("GPU"). Hoisted variants start from
the real tokens, laid out as a collator leaves them: on the GPU for the eager variant, on the host for the graph.
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
from models import Case, gradient_errors, make_batch, make_model
from sebp_edge.insight.bench.timer import peak_bytes, running, seconds
from sebp_edge.insight.bench.variants import DENSE, DROP_IN, EagerStep, Mark, Step, Variant, trained
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.texts.batches import Batch
from sebp_edge.training.captured_gradients import CapturedGradients
from speed.graph_time import milliseconds_in_kernels

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
    """A benchmark command and its cases.

    Attributes:
        name: the name its results are recorded under.
        cases, tiny_cases: what it measures on a GPU, and with --tiny on the CPU.
        variants_for: the variants of a step of a batch.
        file: the benchmark's own file, one of the sources of its figures.
        samples: how often each part is timed in a round.
        kernel_repeats: number of calls over which kernel times are averaged.
    """

    name: str
    cases: Callable[[], Iterable[Case]]
    tiny_cases: Callable[[], Iterable[Case]]
    variants_for: Callable[[nn.Module, Batch], tuple[Variant, ...]]
    file: str
    samples: int
    kernel_repeats: int

    def main(self, description: str, arguments: list[str] | None) -> None:
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--tiny", action="store_true")
        evidence.add_record_option(parser)
        options = parser.parse_args(arguments)
        if options.tiny and options.record:
            parser.error("--record is for GPU runs only; leave out --record or --tiny.")
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
