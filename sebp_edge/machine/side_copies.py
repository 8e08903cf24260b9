"""Copies between host and GPU in parallel with computing, on streams that captured graphs include."""

import functools

import torch
from torch import Tensor

# What is copied, each on a stream of its own.
INPUTS, WEIGHTS = "inputs of blocks", "weights of blocks"


@functools.cache
def _stream(device: torch.device, what: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def begin_copy(destination: Tensor, source: Tensor, what: str) -> None:
    """Copies; to or from a GPU on a separate stream, after the work queued so far and in parallel with later work.

    Neither tensor may change before `wait_for_copies`.
    """
    device = destination.device if destination.is_cuda else source.device
    if device.type != "cuda":
        destination.copy_(source)
        return
    stream = _stream(device, what)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        destination.copy_(source, non_blocking=True)


def wait_for_copies(device: torch.device, what: str) -> None:
    """Makes the current stream wait for all copies begun; the host does not wait."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device, what))


def join_copies(device: torch.device) -> None:
    """Makes the current stream wait for all copies begun; needed before a capture ends and after a failure."""
    if device.type != "cuda":
        return
    for what in (INPUTS, WEIGHTS):
        with torch.cuda.stream(_stream(device, what)):
            forked = torch.cuda.is_current_stream_capturing()
        # A capture may only wait for copies that are part of it.
        if forked or not torch.cuda.is_current_stream_capturing():
            wait_for_copies(device, what)
