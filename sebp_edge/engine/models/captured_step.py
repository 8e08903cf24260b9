"""Captures the one-token steps of `Decoder` as CUDA graphs, for a few sizes, and replays them.

A step of a small model launches hundreds of short kernels, and the GPU waits for most of them; a replay launches all at
once. Graphs need fixed sizes, so rows are filled up to a power of 4, and columns to a multiple of 128; in a small cache
all are computed, since a capture takes as long as dozens of steps.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sebp_edge.engine.models.row_cache import RowCache
from sebp_edge.machine.captures import capturing, side_stream
from sebp_edge.machine.devices import without_autocast_cache

ROW_FACTOR, COLUMN_STEP = 4, 128
# The most cells, rows times columns, of a cache whose steps have one size. In a 3B model, reading so many keys and
# values takes a fiftieth of the time for the weights.
CELLS_OF_ONE_SIZE = 1024

# Takes tokens and their positions, [rows, 1] each, and a number of columns; returns logits, [rows, vocabulary].
Step = Callable[[Tensor, Tensor, int], Tensor]


def size_holding(rows: int, columns: int, cache: RowCache) -> tuple[int, int]:
    """Returns the rows and columns of the smallest step that holds these numbers, within the cache."""
    if cache.rows * cache.columns <= CELLS_OF_ONE_SIZE:
        return cache.rows, cache.columns
    filled = 1
    while filled < rows:
        filled *= ROW_FACTOR
    return min(filled, cache.rows), min(-(-columns // COLUMN_STEP) * COLUMN_STEP, cache.columns)


class CapturedSteps:
    """Steps on one `RowCache`, captured on first use; they share one memory pool, since they run one after another."""

    def __init__(self, device: torch.device, cache: RowCache, step: Step):
        self._device, self._cache, self._step = device, cache, step
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], _StepGraph] = {}

    def __call__(self, last: list[int], positions: list[int]) -> Tensor:
        """Returns the logits after each row's last token, whose position is given, until the next replay.

        Raises:
            CannotCapture: the step ran, but its capture failed; an eager step may take its place.
            RuntimeError: memory ran out.
        """
        rows, columns = size_holding(len(last), max(positions) + 1, self._cache)
        # A row that only fills up writes its own first column, which no row in use reads.
        fill = [0] * (rows - len(last))
        tokens = torch.tensor([last + fill, positions + fill])
        if (rows, columns) not in self._captured:
            step = functools.partial(self._step, width=columns)
            with self._cache.unmoved():
                self._captured[rows, columns] = _StepGraph(tokens.to(self._device), step, self._pool)
        return self._captured[rows, columns](tokens)[: len(last)]


class _StepGraph:
    """The graph of a step of one size, with the tokens and positions that it reads, [2, rows]."""

    def __init__(self, tokens: Tensor, step: Callable[[Tensor, Tensor], Tensor], pool):
        self._tokens = tokens
        ids, positions = tokens[:, :, None]
        device = tokens.device
        side, current = side_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        # A first run initialises libraries; it writes the same keys and values as the replay, and advances states.
        with torch.cuda.stream(side), without_autocast_cache(device):
            step(ids, positions)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool, device):
            self._logits = step(ids, positions)
        self._replay = graph.replay

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the logits, after copying tokens and positions from the host."""
        self._tokens.copy_(tokens)
        self._replay()
        return self._logits
