"""Times training steps, and their parts.

On a GPU, events mark the parts of a step, so the host does not wait for the GPU within the step.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise

import torch
from torch import nn

from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.machine.devices import release_memory, seconds_of, synchronize
from speed.trainers.steps import Step, Variant


@dataclass(frozen=True)
class Times:
    """Seconds of one training step, by part.

    Attributes:
        forward, backward: None if the two cannot be told apart.
        step: forward, backward and update.
        peak_bytes: the peak of torch's allocator on a GPU, with weights, captures and the first step; None elsewhere.
    """

    forward: float | None
    backward: float | None
    step: float
    peak_bytes: int | None


def time_steps(step: Step, device: torch.device, *, warm_ups: int, repeats: int) -> list[Times]:
    """Times `repeats` steps within `running`, after `warm_ups` untimed ones."""
    for _ in range(warm_ups):
        _time_one(step, device)
    found = [_time_one(step, device) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return [Times(parts.get("forward"), parts.get("backward"), whole, peak) for parts, whole in found]


def medians(found: list[Times]) -> Times:
    """The median of each part, and the highest peak."""
    *parts, peaks = zip(*map(astuple, found), strict=True)
    middles = (None if None in part else statistics.median(part) for part in parts)
    return Times(*middles, None if None in peaks else max(peaks))


@contextmanager
def running(model: nn.Module, batch: Batch, variant: Variant) -> Iterator[Step]:
    """Yields a variant's step, and detaches the variant afterwards; updates of the weights remain."""
    device = batch.input_ids.device
    # An autograd graph that is still alive would accumulate gradients on the stream it was created on.
    gc.collect()
    release_memory(device)
    with variant.attach(model) as handle:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step = variant.step(handle, model, batch)
        try:
            yield step
        finally:
            step.release()


def _time_one(step: Step, device: torch.device) -> tuple[dict[str, float], float]:
    """Seconds of each part of a step, by name, and of the whole step."""
    clock = _Clock(device)

    def marked() -> None:
        clock.mark("begin")
        step(clock.mark)

    whole = seconds_of(marked, device)
    return clock.parts(), whole


class _Clock:
    """Marks when the parts of a step are done: by events on a GPU, else by the host's clock."""

    def __init__(self, device: torch.device):
        self._device, self._marks = device, []

    def mark(self, part: str) -> None:
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self._device))
        else:
            synchronize(self._device)
            moment = time.perf_counter()
        self._marks.append((part, moment))

    def parts(self) -> dict[str, float]:
        """Seconds from the previous mark to each mark, by name; the device must be done."""
        pairs = pairwise(self._marks)
        if self._device.type == "cuda":
            return {part: begin.elapsed_time(end) / 1e3 for (_, begin), (part, end) in pairs}
        return {part: end - begin for (_, begin), (part, end) in pairs}
