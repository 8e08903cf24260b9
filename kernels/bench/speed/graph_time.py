"""Prepares backward passes for timing in captured graphs, and sums the kernel times of what cannot be captured."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import DeviceType

from sebp_edge.ops.timing import capture_stream


def make_backward(forward: Callable, inputs: list[Tensor] | tuple[Tensor, ...], *douts: Tensor) -> Callable:
    """A function that runs only the backward pass of `forward`, any number of times, and returns the gradients."""
    stream = capture_stream()
    # The inputs were made on the current stream.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, inputs, douts or None, retain_graph=True)


def milliseconds_in_kernels(parts: dict[str, Callable], *, repeats: int = 7) -> dict[str, float]:
    """The summed times of the kernels of one call, as a mean over calls, from torch's profiler.

    For functions that cannot be captured. All parts share one trace, since starting a trace takes longer than most
    parts; a waiting kernel separates them.
    """
    from torch.profiler import ProfilerActivity, profile

    with torch.cuda.stream(capture_stream()):
        for run in parts.values():
            run()
        torch.cuda.synchronize()
        # acc_events avoids the profiler's warning that it drops the events of earlier cycles.
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            for run in parts.values():
                for _ in range(repeats):
                    run()
                torch.cuda._sleep(1)
            torch.cuda.synchronize()
    sums = sums_before_waits(event for event in trace.events() if event.device_type == DeviceType.CUDA)
    return {part: found / 1000 / repeats for part, found in zip(parts, sums, strict=True)}


def sums_before_waits(events: Iterable) -> list[float]:
    """Summed microseconds of the GPU events between each waiting kernel and the one before it."""
    sums, current = [], 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            sums.append(current)
            current = 0.0
        else:
            current += event.time_range.elapsed_us()
    return sums
