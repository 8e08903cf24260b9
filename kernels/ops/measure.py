"""Times every algorithm for the gradients of a linear layer on this GPU, and saves the fastest ones for `choices`.

It takes seconds per layer, so it never runs inside a training step. An algorithm is timed only after its result has
been compared with cuBLAS's. Times are medians of replays of captured graphs, without the host's launches.
"""

import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import choices
from .gpu import move_rows, products
from .rows import ActiveRows
from .tiles import DWEIGHT_CANDIDATES, DX_CANDIDATES, Tiles


class LayerTimes(NamedTuple):
    """Milliseconds of one layer's products on one set of rows."""

    gather: float  # dY[A], which cuBLAS needs, once for both products
    # Our kernels by their tiles; under None cuBLAS, with what it needs after the gather.
    dx: dict[Tiles | None, float]
    dweight: dict[Tiles | None, float]

    def of(self, wanted: str, algorithms: choices.Algorithms) -> float:
        """Milliseconds of "dx", "dweight" or "both" by these algorithms."""
        parts = [(self.dx, algorithms.dx)] * (wanted != "dweight") + [(self.dweight, algorithms.dweight)] * (
            wanted != "dx"
        )
        return sum(times[tiles] for times, tiles in parts) + self.gather * any(tiles is None for _, tiles in parts)


def measure(
    layers: Iterable[tuple[int, int]], row_sets: list[ActiveRows], dtype: torch.dtype
) -> dict[choices.Shape, choices.Algorithms]:
    """Finds and saves the fastest algorithms for layers, given as (inputs, outputs), on these rows."""
    found = {}
    for num_inputs, num_outputs in layers:
        times = [(rows, time_products(num_inputs, num_outputs, rows, dtype)) for rows in row_sets]
        found |= fastest(num_inputs, num_outputs, dtype, times)
    index = choices.device_index(row_sets[0].ids.device)
    choices.write(choices.measured_file(index), choices.machine(index), found)
    return found


def fastest(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, times: list[tuple[ActiveRows, LayerTimes]]
) -> dict[choices.Shape, choices.Algorithms]:
    """The best algorithms of each shape: those with the least summed slowdown over the row sets that share it."""
    by_shape = defaultdict(list)
    for (rows, one), (dx, dweight) in itertools.product(times, [(True, False), (False, True), (True, True)]):
        shape = choices.Shape.of(dx, dweight, dtype.itemsize, num_inputs, num_outputs, len(rows.ids))
        by_shape[shape].append(one)
    return {shape: _best_algorithms(shape.wanted, several) for shape, several in by_shape.items()}


def _best_algorithms(wanted: str, times: list[LayerTimes]) -> choices.Algorithms:
    # A product that is not needed counts as cuBLAS's, which costs nothing.
    options_dx = set.intersection(*(set(one.dx) for one in times)) if wanted != "dweight" else {None}
    options_dweight = set.intersection(*(set(one.dweight) for one in times)) if wanted != "dx" else {None}
    algorithms = [choices.Algorithms(dx, dweight) for dx, dweight in itertools.product(options_dx, options_dweight)]
    best = [min(one.of(wanted, algorithm) for algorithm in algorithms) for one in times]
    return min(
        algorithms,
        key=lambda algorithm: sum(one.of(wanted, algorithm) / least for one, least in zip(times, best, strict=True)),
    )


def time_products(num_inputs: int, num_outputs: int, rows: ActiveRows, dtype: torch.dtype) -> LayerTimes:
    """Times all algorithms for one layer on rows whose number the host knows."""
    device, num_rows = rows.ids.device, len(rows.slots)
    shared_memory = choices.shared_memory(choices.device_index(device))
    draw = torch.Generator(device).manual_seed(0)
    dout_NM = torch.randn(num_rows, num_outputs, generator=draw, device=device, dtype=dtype)
    weight_MK = torch.randn(num_outputs, num_inputs, generator=draw, device=device, dtype=dtype)
    x_AK = torch.randn(len(rows.ids), num_inputs, generator=draw, device=device, dtype=dtype)
    dout_AM = dout_NM[rows.ids]

    def ours_dx(tiles):
        return lambda: products.dx(dout_NM, weight_MK, rows, tiles)

    def ours_dweight(tiles):
        return lambda: products.dweight(dout_NM, x_AK, rows, tiles, x_has_all_rows=False, with_bias=False).dweight

    def cublas_dx():
        return move_rows.scatter_rows(dout_AM @ weight_MK, rows.slots)

    def fitting(candidates):
        return [tiles for tiles in candidates if tiles.fits(dtype.itemsize, shared_memory)]

    dx_algorithms = {None: cublas_dx} | {tiles: ours_dx(tiles) for tiles in fitting(DX_CANDIDATES)}
    dweight_algorithms = {None: lambda: dout_AM.T @ x_AK} | {t: ours_dweight(t) for t in fitting(DWEIGHT_CANDIDATES)}
    true_dx = torch.zeros(num_rows, num_inputs, device=device)
    true_dx[rows.ids] = dout_AM.float() @ weight_MK.float()
    check(dx_algorithms, true_dx)
    check(dweight_algorithms, dout_AM.float().T @ x_AK.float())
    return LayerTimes(
        milliseconds(lambda: move_rows.gather_rows(dout_NM, rows.ids)),
        {tiles: milliseconds(algorithm) for tiles, algorithm in dx_algorithms.items()},
        {tiles: milliseconds(algorithm) for tiles, algorithm in dweight_algorithms.items()},
    )


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


def check(algorithms: dict[Tiles | None, Callable[[], Tensor]], truth: Tensor) -> None:
    """Checks that no algorithm's error exceeds twice that of cuBLAS plus 1e-4."""
    allowed = 2 * relative_error(algorithms[None](), truth) + 1e-4
    for tiles, algorithm in algorithms.items():
        error = relative_error(algorithm(), truth)
        if not error <= allowed:
            raise RuntimeError(f"{tiles} has a relative error of {error:.2g}, above {allowed:.2g}.")


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The norm of the error over the norm of the truth, computed in the truth's dtype."""
    return float((found.to(truth.dtype) - truth).norm() / truth.norm())
