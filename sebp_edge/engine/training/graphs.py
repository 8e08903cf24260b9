"""Captures micro-batches and updates as CUDA graphs on first use, and replays them from then on (level 3).

A captured graph runs without Python and without a launch per kernel, but on fixed tensors of fixed sizes. So each
micro-batch is filled up to its bucket and copied into the bucket's tensors; gradients, the loss and the learning rate
have fixed tensors too. The graphs of all micro-batches share one memory pool, since they run one after another and none
keeps results in it.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sebp_edge.basics.files import cache_folder
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.engine.sparse.patches.state import ModelState
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.buckets import Bucket, choose_buckets
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import SparsityError
from sebp_edge.events import GraphCaptured, Sink
from sebp_edge.machine.captures import capturing, side_stream
from sebp_edge.machine.devices import without_autocast_cache
from sebp_edge.machine.side_copies import join_copies
from sebp_edge.ops import tuning

# Parts of a micro-batch's work.
GRADIENTS, LOSSES, WORDS = "gradients", "losses", "words"


class GraphPool:
    """Captures functions on one stream of a GPU into one memory pool, which lives as long as any graph in it.

    Attributes:
        is_warming_up: whether a function is being run by `warm_up`.
    """

    def __init__(self, device: torch.device, on_event: Sink):
        self._device, self._on_event = device, on_event
        self._stream = side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seconds = 0.0
        self.is_warming_up = False

    def warm_up(self, function: Callable[[], object]) -> None:
        """Runs `function` once before its capture, to initialise state and tune matrix products.

        Warm-up and capture share a side stream, since autograd accumulates gradients on the stream where it started.
        """
        begin = time.perf_counter()
        # Blocks cached by an earlier warm-up have other sizes, so this one would allocate in addition to them.
        torch.cuda.empty_cache()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self.is_warming_up = True
        try:
            with torch.cuda.stream(self._stream), without_autocast_cache(self._device), tuning(cache_folder()):
                try:
                    function()
                finally:
                    join_copies(self._device)
        finally:
            self.is_warming_up = False
            # Even after a failure, later work must wait for the launched kernels.
            current.wait_stream(self._stream)
        self._seconds += time.perf_counter() - begin

    def capture(self, part: str, function: Callable[[], object]) -> Callable[[], None]:
        """Captures `function`, which must be warmed up; returns the replay.

        Args:
            part: the function's name in the event that reports the time of the capture and of the warm-ups before it.

        Raises:
            CannotCapture: the function ran, but its capture failed.
            RuntimeError: memory ran out; the partial graph is freed.
        """
        begin = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool, self._device):
            try:
                function()
            finally:
                # A capture cannot end before its copies are joined; otherwise its memory leaks.
                join_copies(self._device)
        self._on_event(GraphCaptured(part, self._seconds + time.perf_counter() - begin))
        self._seconds = 0.0
        return graph.replay


class TakesGradients(Protocol):
    """Consumes the gradients of a micro-batch."""

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool) -> None:
        """Runs the backward pass of `loss`; if `is_warming_up`, the loss has weight zero, and nothing may change."""


class MicroBatchGraphs:
    """Computes losses and gradients of a hoisted model's micro-batches with graphs of a few buckets.

    A graph keeps the dropout of the mode that the model was captured in, and draws new random numbers in each replay.

    Args:
        updates: the consumers of gradients, by name; each has its own graphs.
        loss: the accumulator of the losses, an fp32 scalar on the device.
        words: reads the words of test documents; None to compute their losses only.
    """

    def __init__(
        self,
        graphs: GraphPool,
        hoisted: Hoisted | HoistedEncoder,
        updates: dict[str, TakesGradients],
        loss: Tensor,
        words: WordReader | None = None,
    ):
        self._graphs, self._hoisted, self._updates, self._loss = graphs, hoisted, updates, loss
        self._words = words
        # Each part of the work has graphs of its own, so that those without gradients share no bucket with the others.
        self._trained, self._evaluated = _Buckets(), _Buckets()
        self._planned: set[_Key] = set()
        self._warmed_up: set[_Key] = set()
        self._captured: dict[_Key, _CapturedGraph] = {}
        self._state: ModelState | None = None  # of the model that was captured

    def prepare(
        self,
        needed: Iterable[tuple[Bucket, bool]],
        validation: Iterable[tuple[Bucket, bool]] = (),
        test: Iterable[tuple[Bucket, bool]] = (),
        nums_soft_targets: Iterable[int] = (0,),
    ) -> None:
        """Chooses a few buckets that hold all later micro-batches.

        Args:
            needed: the sizes of micro-batches with gradients, as buckets on the grid, and whether they have prefixes;
                repeated as often as they run.
            validation, test: those of micro-batches without gradients.
            nums_soft_targets: the numbers of soft targets that rows of micro-batches with gradients have.
        """
        needed, validation, test = list(needed), list(validation), list(test)
        self._trained.hold(own for own, _ in needed)
        self._evaluated.hold(own for own, _ in (*validation, *test))
        held_out = ((LOSSES, validation), (WORDS if self._words else LOSSES, test))
        self._planned |= {
            self._key(part, self._trained.holding(own), number, has_prefixes)
            for part in self._updates
            for own, has_prefixes in set(needed)
            for number in nums_soft_targets
        }
        self._planned |= {
            self._key(part, self._evaluated.holding(own), has_prefixes=has_prefixes)
            for part, each in held_out
            for own, has_prefixes in set(each)
        }

    def accumulate(self, tokens: ActiveTokens, loss_tokens: int, part: str = GRADIENTS) -> None:
        """Adds a micro-batch's loss and passes its gradients to an update; does not wait for the GPU.

        Args:
            loss_tokens: the divisor of the sum of losses.
            part: the name of the update that consumes the gradients.

        Raises:
            CannotCapture: the micro-batch cannot be captured; nothing was changed.
            SparsityError: the model has changed since its graphs were captured; the gradients are not to be used.
        """
        bucket = self.bucket(tokens.sizes)
        graph = self._get_graph(part, bucket, tokens)
        graph.fill(tokens.filled(bucket).weighted(1 / loss_tokens))
        graph.replay()
        self._refuse_changes()

    def capture(self, tokens: ActiveTokens) -> None:
        """Captures the graph that `accumulate` will replay, unless it exists; changes nothing."""
        self._get_graph(GRADIENTS, self.bucket(tokens.sizes), tokens)

    def bucket(self, sizes: Bucket) -> Bucket:
        """Returns the bucket that a micro-batch of these sizes with gradients is filled up to."""
        return self._trained.holding(sizes)

    def losses(self, tokens: ActiveTokens, part: str = LOSSES) -> Tensor:
        """Returns the loss of every loss row, in nats: fp32 [C]. Tokens and losses are on the host.

        With the part `WORDS`, returns what is read of their words instead, fp32 [C, F].
        """
        bucket = self._evaluated.holding(tokens.sizes)
        filled = tokens.filled(bucket)
        graph = self._get_graph(part, bucket, tokens)
        graph.fill(filled)
        graph.replay()
        self._refuse_changes()
        return graph.result.cpu()[filled.weights > 0]

    def _get_graph(self, part: str, bucket: Bucket, tokens: ActiveTokens) -> "_CapturedGraph":
        """Returns a part's graph for a bucket, captured on first use."""
        key = self._key(part, bucket, tokens.num_soft_targets, tokens.prefixes is not None)
        if key not in self._captured:
            # Tensors made in inference mode could not be written to later.
            with torch.inference_mode(False):
                self._warm_up(key, tokens)
                on_device = tokens.filled(bucket).to(self._loss.device)
                self._captured[key] = _CapturedGraph(self._graphs, part, on_device, functools.partial(self._run, part))
            self._state = self._hoisted.state
        return self._captured[key]

    def _refuse_changes(self) -> None:
        """Raises a SparsityError if a graph computes what the model was; takes no time while the GPU is busy."""
        change = self._state.find_change()
        if change is None and self._state is not self._hoisted.state:
            change = "and was hoisted again"
        if change is not None:
            raise SparsityError(
                f"The model has changed since its graphs were captured ({change}); undo the change, or hoist the model "
                "and capture graphs again. Set all gradients to zero before the next step."
            )

    def _key(self, part: str, bucket: Bucket, num_soft_targets: int = 0, has_prefixes: bool = False) -> "_Key":
        return _Key(part, bucket, self._hoisted.model.training, num_soft_targets, has_prefixes)

    @torch.enable_grad()
    def _warm_up(self, requested: "_Key", tokens: ActiveTokens) -> None:
        """Warms up the requested key and all planned ones that are not warmed up yet, the largest first.

        All are warmed up before the first capture, since a graph keeps the memory of its run, and later warm-ups would
        need theirs in addition.
        """
        for key in sorted({requested, *self._planned} - self._warmed_up, key=_Key.order):
            # With weights of zero, gradients and loss do not change.
            first = tokens.first_token(key.num_soft_targets, has_prefixes=key.has_prefixes)
            filled = first.filled(key.bucket)
            weightless = filled.to(self._loss.device).weighted(0.0)
            self._graphs.warm_up(functools.partial(self._run, key.part, weightless))
            self._warmed_up.add(key)

    def _run(self, part: str, tokens: ActiveTokens) -> Tensor | None:
        if part in self._updates:
            loss = (self._hoisted.row_losses(tokens) * tokens.weights).sum()
            self._updates[part].take_gradients(loss, is_warming_up=self._graphs.is_warming_up)
            self._loss.add_(loss.detach())
            return None
        with torch.no_grad():
            if part == LOSSES:
                return self._hoisted.row_losses(tokens)
            return self._words.read(self._hoisted.row_logits(tokens), tokens.targets)


class _Buckets:
    """The few buckets that were chosen for sizes; those chosen later are added, since graphs of the others exist."""

    def __init__(self):
        self._chosen: list[Bucket] = []
        self._held: set[Bucket] = set()  # sizes that one was chosen for

    def hold(self, sizes: Iterable[Bucket]) -> None:
        """Chooses buckets for sizes, which are repeated as often as they run."""
        new = [own for own in sizes if own not in self._held]
        self._chosen += choose_buckets(new)
        self._held.update(new)

    def holding(self, sizes: Bucket) -> Bucket:
        """Returns the cheapest one that holds a micro-batch of these sizes; if none does, the smallest on the grid."""
        fitting = [bucket for bucket in self._chosen if bucket.holds(sizes)]
        return min(fitting, key=lambda bucket: bucket.cost, default=sizes.on_grid)


class _Key(NamedTuple):
    """A part of a micro-batch's work, its bucket, the model's mode, and what else decides about the graph's tensors.

    These are the number of soft targets of a loss row, and whether there are prefixes, which a warm-up needs before it
    has seen such a micro-batch.
    """

    part: str
    bucket: Bucket
    training: bool
    num_soft_targets: int
    has_prefixes: bool

    @property
    def has_gradients(self) -> bool:
        return self.part not in (LOSSES, WORDS)

    def order(self) -> tuple[bool, str, float, int, bool]:
        """Sort key: those with gradients first, then the largest first."""
        return not self.has_gradients, self.part, -self.bucket.cost, -self.num_soft_targets, self.has_prefixes


class _CapturedGraph:
    """The graph of a function for one bucket, with the tensors that it reads and writes.

    Attributes:
        replay: computes the function of the tokens that it was filled with.
        result: what the function returned; valid until the next replay.
    """

    def __init__(
        self, graphs: GraphPool, part: str, tokens: ActiveTokens, function: Callable[[ActiveTokens], Tensor | None]
    ):
        self._tokens = tokens
        self.result: Tensor | None = None

        def run() -> None:
            result = function(tokens)
            if result is not None:
                # Allocated outside the pool, since other graphs overwrite the pool's memory.
                self.result = torch.empty_like(result) if self.result is None else self.result
                self.result.copy_(result)

        self.replay = graphs.capture(part, run)

    def fill(self, tokens: ActiveTokens) -> None:
        """Copies tokens on the host to the tensors that the graph reads."""
        for buffer, values in zip(self._tokens.tensors, tokens.tensors, strict=True):
            buffer.copy_(values.pin_memory(), non_blocking=True)
