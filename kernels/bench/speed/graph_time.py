"""Prepares backward passes for timing in captured graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from sebp_edge.ops.measure import capture_stream


def make_backward(forward: Callable, inputs: list[Tensor] | tuple[Tensor, ...], *douts: Tensor) -> Callable:
    """A function that runs only the backward pass of `forward`, any number of times, and returns the gradients."""
    stream = capture_stream()
    # The inputs were made on the current stream.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, inputs, douts or None, retain_graph=True)
