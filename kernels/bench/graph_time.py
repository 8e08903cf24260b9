"""Backward passes to be timed in captured graphs (`sebp_edge.ops.timing`), and what is timed without one."""

from collections.abc import Callable

import torch
from torch import Tensor

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


def milliseconds_in_kernels(function: Callable, *, repeats: int = 7) -> float:
    """Mean of the summed times of one call's kernels, by torch's profiler: for what cannot be captured."""
    from torch.profiler import ProfilerActivity, profile

    with torch.cuda.stream(capture_stream()):
        function()
        torch.cuda.synchronize()
        # Accumulating events keeps the profiler from warning that it forgets those of an earlier cycle.
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            for _ in range(repeats):
                function()
            torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in trace.key_averages()) / 1000 / repeats
