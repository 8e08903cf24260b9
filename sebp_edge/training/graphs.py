"""Level 3: micro-batches and updates as CUDA graphs, captured on first use and replayed from then on.

A captured graph runs without Python and without a launch for each kernel, but on fixed tensors of fixed sizes. So a
micro-batch is filled up to its bucket and copied into the bucket's own tensors; gradients, the loss and the learning
rate have theirs too. All micro-batches' graphs share one memory pool: they run one after another, and none leaves
anything in it.
"""

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sebp_edge.events import GraphCaptured, Sink
from sebp_edge.files import cache_folder
from sebp_edge.machine.devices import casting_anew, ran_out_of_memory
from sebp_edge.ops import tuning
from sebp_edge.patches.checkpoints import join_copies
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.buckets import Bucket, choose_buckets
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder

# Parts of a micro-batch's work.
GRADIENTS, LOSSES = "gradients", "losses"


class CannotCapture(Exception):
    """A function ran, but does what no graph can hold, such as waiting for the GPU."""


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all trainings of a process: for each stream that was ever used, cuBLAS keeps a workspace."""
    return torch.cuda.Stream(device)


class Graphs:
    """Captures functions of one GPU: on one stream, into one memory pool, which lives as long as a graph in it does.

    Attributes:
        rehearsing: whether a function runs only so that what it makes on first use is made.
    """

    def __init__(self, device: torch.device, on_event: Sink):
        self._device, self._on_event = device, on_event
        self._stream = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seconds = 0.0
        self.rehearsing = False

    def rehearse(self, function: Callable[[], object]) -> None:
        """Runs `function` once as it is, so that what it makes on first use is made before its capture, and products'
        algorithms are chosen.

        Both happen on the same side stream: autograd's accumulation stays on the stream that it first ran on.
        """
        begin = time.perf_counter()
        # What an earlier rehearsal left is in pieces of other sizes: beside them this one would get its own.
        torch.cuda.empty_cache()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self.rehearsing = True
        try:
            with torch.cuda.stream(self._stream), casting_anew(self._device), tuning(cache_folder()):
                try:
                    function()
                finally:
                    join_copies(self._device)
        finally:
            self.rehearsing = False
            # Also what a run that failed has begun comes before all that follows.
            current.wait_stream(self._stream)
        self._seconds += time.perf_counter() - begin

    def capture(self, part: str, function: Callable[[], object]) -> Callable[[], None]:
        """Captures `function`, which has been rehearsed; gives the replay.

        Args:
            part: what the function is called in the event that tells how long this and the rehearsals before it took.

        Raises:
            CannotCapture: the function ran, but its capture failed.
            RuntimeError: the function failed, or memory ran out, and nothing is left of it.
        """
        begin = time.perf_counter()
        # A capture that fails at its end does not come back from the side stream by itself.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), casting_anew(self._device):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        function()
                    finally:
                        # With a copy on its way a capture cannot end, and its memory would be lost.
                        join_copies(self._device)
            except RuntimeError as error:
                if ran_out_of_memory(error):
                    raise
                raise CannotCapture(str(error).splitlines()[0]) from error
        self._on_event(GraphCaptured(part, self._seconds + time.perf_counter() - begin))
        self._seconds = 0.0
        return graph.replay


class TakesGradients(Protocol):
    """What is done with the gradients of a micro-batch."""

    def take_gradients(self, loss: Tensor, *, rehearsing: bool) -> None:
        """Runs the backward pass of `loss`; if `rehearsing`, of a loss times zero, and nothing may change by it."""


class MicroBatchGraphs:
    """The losses and the gradients of a hoisted model's micro-batches: graphs of a few buckets.

    A graph has the dropout of the mode that the model was in when it was captured, and draws anew in each replay.

    Args:
        updates: take the gradients, each in graphs of its own, by name.
        loss: fp32 scalar on the device; losses are added up in it.
    """

    def __init__(
        self, graphs: Graphs, hoisted: Hoisted | HoistedEncoder, updates: dict[str, TakesGradients], loss: Tensor
    ):
        self._graphs, self._hoisted, self._updates, self._loss = graphs, hoisted, updates, loss
        self._buckets: list[Bucket] = []
        self._to_come: set[_Key] = set()
        self._rehearsed: set[_Key] = set()
        self._captured: dict[_Key, _Captured] = {}

    def prepare(self, needed: Iterable[Bucket], held_out: Iterable[Bucket] = ()) -> None:
        """Is told the buckets on the grid that are to come, with gradients and without, so that few hold them all."""
        self._buckets += choose_buckets(own for own in needed if not any(own == bucket for bucket in self._buckets))
        self._to_come |= {self._key(part, bucket) for part in self._updates for bucket in self._buckets}
        self._to_come |= {self._key(LOSSES, self.bucket(sizes)) for sizes in held_out}

    def accumulate(self, tokens: ActiveTokens, loss_tokens: int, part: str = GRADIENTS) -> None:
        """Has the gradients of a micro-batch's losses over `loss_tokens` taken, and adds up the loss.

        Args:
            tokens: on the host. The GPU is not waited for.
            part: the name of the update that takes them.

        Raises:
            CannotCapture: nothing was changed.
        """
        bucket = self.bucket(tokens.sizes)
        self._graph_of(part, bucket, tokens)(tokens.filled(bucket).weighted(1 / loss_tokens))

    def rehearse(self, tokens: ActiveTokens) -> None:
        """Captures what `accumulate` will replay, if it is not yet, and changes nothing.

        Raises:
            CannotCapture: as `accumulate` would.
        """
        self._graph_of(GRADIENTS, self.bucket(tokens.sizes), tokens)

    def bucket(self, sizes: Bucket) -> Bucket:
        """What a micro-batch of these sizes is filled up to."""
        fitting = [bucket for bucket in self._buckets if bucket.holds(sizes)]
        return min(fitting, key=lambda bucket: bucket.cost, default=Bucket.holding(*sizes))

    def losses(self, tokens: ActiveTokens) -> Tensor:
        """The loss of every loss row, in nats: fp32 [C]; tokens and losses are on the host.

        Raises:
            CannotCapture: it did not come to a result.
        """
        bucket = self.bucket(tokens.sizes)
        filled = tokens.filled(bucket)
        return self._graph_of(LOSSES, bucket, tokens)(filled).cpu()[filled.weights > 0]

    def _graph_of(self, part: str, bucket: Bucket, tokens: ActiveTokens) -> "_Captured":
        """A part's graph of one bucket, captured on first use."""
        key = self._key(part, bucket)
        if key not in self._captured:
            self._rehearse(key, tokens.first())
            on_device = tokens.filled(bucket).to(self._loss.device)
            self._captured[key] = _Captured(self._graphs, part, on_device, functools.partial(self._run, part))
        return self._captured[key]

    def _key(self, part: str, bucket: Bucket) -> "_Key":
        return _Key(part, bucket, self._hoisted.model.training)

    @torch.enable_grad()
    def _rehearse(self, asked: "_Key", token: ActiveTokens) -> None:
        """Runs what is asked for, and all that is known to come, the largest first, where that has not been done.

        All of them before one is captured: a graph holds the memory of its run, which the others' runs would need
        beside it. Only losses where losses are asked for, which must do without gradients.
        """
        to_come = {key for key in self._to_come if asked.part != LOSSES or key.part == LOSSES}
        for key in sorted({asked, *to_come} - self._rehearsed, key=_Key.order):
            # Nothing may be added.
            weightless = token.filled(key.bucket).to(self._loss.device).weighted(0.0)
            self._graphs.rehearse(functools.partial(self._run, key.part, weightless))
            self._rehearsed.add(key)

    def _run(self, part: str, tokens: ActiveTokens) -> Tensor | None:
        return self._row_losses(tokens) if part == LOSSES else self._take_gradients(part, tokens)

    def _take_gradients(self, part: str, tokens: ActiveTokens) -> None:
        loss = (self._hoisted.row_losses(tokens) * tokens.weights).sum()
        self._updates[part].take_gradients(loss, rehearsing=self._graphs.rehearsing)
        self._loss.add_(loss.detach())

    @torch.no_grad()
    def _row_losses(self, tokens: ActiveTokens) -> Tensor:
        return self._hoisted.row_losses(tokens)


class _Key(NamedTuple):
    """A part of a micro-batch's work, its bucket, and whether the model is in training mode."""

    part: str
    bucket: Bucket
    training: bool

    def order(self) -> tuple[bool, str, float]:
        """Those with gradients first, then by size."""
        return self.part == LOSSES, self.part, -self.bucket.cost


class _Captured:
    """A function of one bucket's tokens, its graph, and the tensors that the graph reads and writes."""

    def __init__(
        self, graphs: Graphs, part: str, tokens: ActiveTokens, function: Callable[[ActiveTokens], Tensor | None]
    ):
        self._tokens = tokens
        self._result: Tensor | None = None
        self._replay = graphs.capture(part, lambda: self._run(function))

    def _run(self, function: Callable[[ActiveTokens], Tensor | None]) -> None:
        result = function(self._tokens)
        if result is not None:
            # Outside the pool, which other graphs write to.
            self._result = torch.empty_like(result) if self._result is None else self._result
            self._result.copy_(result)

    def __call__(self, tokens: ActiveTokens) -> Tensor | None:
        """The function's result for tokens on the host, valid until the next call."""
        for field in fields(tokens):
            if isinstance(place := getattr(self._tokens, field.name), Tensor):
                place.copy_(getattr(tokens, field.name).pin_memory(), non_blocking=True)
        self._replay()
        return self._result
