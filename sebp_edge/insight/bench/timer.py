"""The timer: training steps of one way, and their parts.

On a GPU the parts of a step are told apart by events, without waiting for it within the step.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from sebp_edge.insight.bench.ways import Step, Way
from sebp_edge.machine.devices import give_memory_back, synchronize
from sebp_edge.texts.batches import Batch

ROUNDS = 3
STEPS_PER_ROUND = 2


@dataclass(frozen=True)
class Times:
    """Seconds of one training step, by part.

    Attributes:
        forward, backward: None where the two cannot be told apart.
        step: both and the update.
        peak_bytes: the most that torch's allocator held on a GPU, weights, captures and the first step included; None
            elsewhere.
    """

    forward: float | None
    backward: float | None
    step: float
    peak_bytes: int | None


def time_way(model: nn.Module, batch: Batch, way: Way) -> list[Times]:
    """The times of a few steps, after one that is not timed: a way's first batch has what training has only once."""
    with running(model, batch, way) as step:
        return time_steps(step, batch.input_ids.device, warm_ups=1, repeats=STEPS_PER_ROUND)


def time_steps(step: Step, device: torch.device, *, warm_ups: int, repeats: int) -> list[Times]:
    """The times of steps within `running`, after some that are not timed."""
    for _ in range(warm_ups):
        _time_one(step, device)
    found = [_time_one(step, device) for _ in range(repeats)]
    peak = peak_bytes(device)
    return [Times(parts.get("forward"), parts.get("backward"), whole, peak) for parts, whole in found]


def medians(found: list[Times]) -> Times:
    """The median of each part, and the highest peak."""
    peaks = [each.peak_bytes for each in found]
    return Times(
        *(_median([getattr(each, part) for each in found]) for part in ("forward", "backward", "step")),
        peak_bytes=None if None in peaks else max(peaks),
    )


def _median(values: list[float | None]) -> float | None:
    return None if None in values else statistics.median(values)


@contextmanager
def running(model: nn.Module, batch: Batch, way: Way) -> Iterator[Step]:
    """A way's step; afterwards the model is what it was, but for what it learnt."""
    device = batch.input_ids.device
    # A graph that is still there would keep its gradients on the stream that it was made on.
    gc.collect()
    give_memory_back(device)
    with way.attach(model) as handle:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step = way.step(handle, model, batch)
        try:
            yield step
        finally:
            step.release()


def _time_one(step: Step, device: torch.device) -> tuple[dict[str, float], float]:
    """Seconds of each part of a step, by its name, and of the whole."""
    clock = _EventClock(device) if device.type == "cuda" else _HostClock(device)

    def marked() -> None:
        clock.mark("begin")
        step(clock.mark)

    whole = seconds(marked, device)
    return clock.parts(), whole


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long one call takes until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch's allocator has held within `running`; None without an NVIDIA GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class _HostClock:
    def __init__(self, device: torch.device):
        self._device, self._marks = device, []

    def mark(self, part: str) -> None:
        synchronize(self._device)
        self._marks.append((part, time.perf_counter()))

    def parts(self) -> dict[str, float]:
        """Seconds from each mark's predecessor to it, by the mark's name."""
        return {part: end - begin for (_, begin), (part, end) in zip(self._marks, self._marks[1:], strict=False)}


class _EventClock:
    def __init__(self, device: torch.device):
        self._device, self._marks = device, []

    def mark(self, part: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((part, event))

    def parts(self) -> dict[str, float]:
        """Seconds from each mark's predecessor to it, by the mark's name; the device has to be done."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {part: begin.elapsed_time(end) / 1e3 for (_, begin), (part, end) in pairs}
