"""Captures work on a GPU as a CUDA graph; torch still draws random numbers if that fails."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.errors import CannotCapture
from sebp_edge.machine.devices import without_autocast_cache


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures of this process; cuBLAS keeps a workspace for every stream ever used."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> Iterator[None]:
    """Context whose work on `device` is captured as `graph` on the side stream, with this memory pool, and not run.

    Raises:
        CannotCapture: the work contains what a graph cannot. If the capture failed at its end, torch 2.11 frees no
            cached memory from then on.
        RuntimeError: memory ran out; the partial graph is freed.
    """
    stream, first = side_stream(device), None
    # If a capture fails at its end, torch leaves the side stream current.
    with torch.cuda.stream(torch.cuda.current_stream(device)), without_autocast_cache(device):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except RuntimeError as error:
                    first = error
                    raise
        except RuntimeError as error:
            _leave_capture(stream)
            if ran_out_of_memory(error):
                raise
            # An error at the end of a capture only says that there was one before.
            raise CannotCapture(str(first or error).splitlines()[0]) from error


def _leave_capture(stream: torch.cuda.Stream) -> None:
    """Captures one operation, which ends well.

    A capture that fails at its end leaves torch's generator of random numbers in it: later random numbers, and replays
    of earlier graphs that draw some, would fail.
    """
    unused = torch.empty(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        unused.zero_()
