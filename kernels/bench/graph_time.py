"""Backward passes to be timed in captured graphs (`sebp_edge.ops.timing`), and what is timed without one."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import DeviceType

from sebp_edge.ops.timing import capture_stream


def backward_of(forward: Callable, inputs: list[Tensor] | tuple[Tensor, ...], *douts: Tensor) -> Callable:
    """A function that runs only the backward pass of `forward`, over and over; it returns the inputs' gradients."""
    stream = capture_stream()
    # What this stream reads was made on another one.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, inputs, douts or None, retain_graph=True)


def milliseconds_in_kernels(parts: dict[str, Callable], *, repeats: int = 7) -> dict[str, float]:
    """Means of the summed times of one call's kernels, by torch's profiler: for what cannot be captured.

    One trace holds all parts, since to begin one takes longer than most of them; between them a kernel waits.
    """
    from torch.profiler import ProfilerActivity, profile

    with torch.cuda.stream(capture_stream()):
        for run in parts.values():
            run()
        torch.cuda.synchronize()
        # Accumulating events keeps the profiler from warning that it forgets those of an earlier cycle.
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            for run in parts.values():
                for _ in range(repeats):
                    run()
                torch.cuda._sleep(1)
            torch.cuda.synchronize()
    sums = sums_before_waits(event for event in trace.events() if event.device_type == DeviceType.CUDA)
    return {part: found / 1000 / repeats for part, found in zip(parts, sums, strict=True)}


def sums_before_waits(events: Iterable) -> list[float]:
    """Microseconds of a GPU's events that ran before each waiting kernel, and after the one before it."""
    sums, current = [], 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            sums.append(current)
            current = 0.0
        else:
            current += event.time_range.elapsed_us()
    return sums
