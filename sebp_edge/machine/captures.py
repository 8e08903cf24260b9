"""Captures work on a GPU as a CUDA graph; leaves torch usable if that fails."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sebp_edge.errors import CannotCapture
from sebp_edge.machine.devices import ran_out_of_memory, without_autocast_cache


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures of this process; cuBLAS keeps a workspace for every stream ever used."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> Iterator[None]:
    """Context whose work on `device` is captured on the side stream and not run.

    Args:
        graph: the graph that the work becomes.
        pool: the memory pool of the graph.

    Raises:
        CannotCapture: the work contains what a graph cannot.
        RuntimeError: memory ran out; the partial graph is freed.
    """
    stream, own_error = side_stream(device), None
    # If a capture fails at its end, torch leaves the side stream current.
    with torch.cuda.stream(torch.cuda.current_stream(device)), without_autocast_cache(device):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except RuntimeError as error:
                    own_error = error
                    raise
        except RuntimeError as error:
            if error is not own_error:
                _leave_capture(pool, stream)
            if ran_out_of_memory(error):
                raise
            raise CannotCapture(str(error).splitlines()[0]) from error


def _leave_capture(pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Ends what torch leaves open if a capture fails at its end.

    Otherwise later random numbers, and replays of earlier graphs that draw some, fail, and no cached memory is freed.
    """
    # Later versions of torch end the pool's part themselves, and then refuse this.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    unused = torch.empty(1, device=stream.device)
    # A capture that ends well takes the generator of random numbers out of the failed one.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        unused.zero_()
