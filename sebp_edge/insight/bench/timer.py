"""The timer: one training step, and steps of several ways in turns, so that a drifting machine slows all of them alike.

On a GPU the parts of a step are told apart by events, without waiting for it within the step.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
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
        peak_bytes: most that torch's allocator held on a GPU, weights included, in the steps that are timed; None
            elsewhere.
    """

    forward: float | None
    backward: float | None
    step: float
    peak_bytes: int | None


def time_in_turns(model: nn.Module, batch: Batch, ways: Sequence[Way], *, rounds: int = ROUNDS) -> dict[str, Times]:
    """The times of each way, by the ways' names. Whether they are right is not looked at here.

    Args:
        model: on its device, with the parameters to train requiring gradients; they are trained on the way.
        batch: on the model's device.
    """
    found: dict[str, list[Times]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way.name] += time_way(model, batch, way)
    return {name: medians(times) for name, times in found.items()}


def time_way(model: nn.Module, batch: Batch, way: Way) -> list[Times]:
    """The times of a few steps, after one that is not timed: a way's first batch has what training has only once."""
    device = batch.input_ids.device
    with running(model, batch, way) as step:
        _time_one(step, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found = [_time_one(step, device) for _ in range(STEPS_PER_ROUND)]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return [_times(parts, whole, peak) for parts, whole in found]


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
    """A way's step on a model that is given back as it was, but for what it learnt."""
    device = batch.input_ids.device
    # A graph that is still there would keep its gradients on the stream that it was made on.
    gc.collect()
    give_memory_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with way.attach(model) as handle:
        step = way.step(handle, model, batch)
        try:
            yield step
        finally:
            step.release()


def _time_one(step: Step, device: torch.device) -> tuple[dict[str, float], float]:
    """Seconds of each part of a step, by its name, and of the whole."""
    clock = _EventClock(device) if device.type == "cuda" else _HostClock(device)
    synchronize(device)
    begin = time.perf_counter()
    clock.mark("begin")
    step(clock.mark)
    synchronize(device)
    return clock.parts(), time.perf_counter() - begin


def _times(parts: dict[str, float], whole: float, peak: int | None) -> Times:
    return Times(parts.get("forward"), parts.get("backward"), whole, peak)


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
