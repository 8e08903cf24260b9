"""GPU time of a function, from replays of a captured graph: without Python, launches or the host."""

import functools
import statistics
from collections.abc import Callable

import torch


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The one stream for capturing timed work, because a backward pass runs on its forward pass's stream."""
    return torch.cuda.Stream()


def milliseconds(function: Callable[[], object], *, calls: int = 5, repeats: int = 5) -> float:
    """Median GPU milliseconds of one call, over replays of a graph of several calls."""
    stream = capture_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)
