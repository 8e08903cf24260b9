"""Verifies that the rows that a batch's labels or mask leave out carry no gradient.

The first backward pass of each kind of call is verified: every layer finds the non-zero rows of its dL/dY, computes
those, so that gradients equal the dense ones, and compares them with the rows that the batch shows. Later passes of
that kind compute the batch's rows only. If a pass finds gradient in another row, rows are found in the backward pass
from then on.

Another loss may be added later. So every pass also checks the gradients of what the call returned, such as logits, and
of the first hidden states, which the gradient of every hidden state reaches.

Shapes: B sequences, T positions, N = B*T rows, M columns.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.ops import ActiveRows, Rows, nonzero_rows, select_rows
from sebp_edge.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)

NOT_SHOWN = (
    "Gradient arrives at rows that the labels or the attention mask leave out (another loss on what the model returns, "
    "or a head that looks at more than labelled tokens). From now on rows are found in the backward pass, which is "
    "exact and slower."
)
INCOMPLETE = (
    "The gradients of this backward pass lack rows: a loss looks at rows that had no gradient in the first pass. Set "
    "gradients to zero and repeat the step; from now on rows are found in the backward pass."
)


class Verification:
    """Records which kinds of a model's calls were verified.

    Attributes:
        has_failed: whether a pass had gradient in rows that its batch left out.
    """

    def __init__(self):
        self.has_failed = False
        self._shown: set[Hashable] = set()
        self._finished: list[tuple[Hashable, Tensor]] = []

    def checked(self, rows: BatchRows, call: Hashable) -> "BatchRows | CheckedRows":
        """Returns the batch's rows if this kind of call was verified, else rows that verify them in the backward pass.

        Waits for the device if a check has finished since the last call.

        Args:
            rows: the rows that the batch shows.
            call: the kind of call.
        """
        self._settle()
        call = (call, rows.leaves_out)
        return rows if call in self._shown else CheckedRows(rows, lambda wrong: self._finished.append((call, wrong)))

    @contextmanager
    def watching(self, rows: "BatchRows | CheckedRows", stream: Sequence[nn.Module]) -> Iterator[Callable]:
        """Context for a forward pass; yields a function that takes and returns the pass's outputs.

        If the backward pass finds gradient in a row that the batch left out, verification fails; if the layers did not
        compute that row, the backward pass raises a SparsityError.

        Args:
            rows: the rows of the pass.
            stream: modules that give all hidden states or the first layers'; the first one whose output requires a
                gradient is watched.
        """
        is_checked = isinstance(rows, CheckedRows)
        watch, claimed = _Watch(self, raises=not is_checked), rows.claimed if is_checked else rows
        is_found = False

        def note(module: nn.Module, inputs: tuple, output) -> None:
            nonlocal is_found
            hidden = next(_tensors(output), None)
            if not is_found and hidden is not None and hidden.requires_grad:
                is_found = True
                watch.look_at(hidden, claimed.everywhere, claimed.num_rows)

        def watched(outputs):
            for output in _tensors(outputs):
                watch.look_at(output, claimed.behind_attention, claimed.num_rows)
            return outputs

        with ExitStack() as undo:
            for module in stream:
                undo.callback(module.register_forward_hook(note).remove)
            yield watched

    def fail(self) -> None:
        """Makes every later call find its rows in the backward pass; logs that once."""
        if not self.has_failed:
            self.has_failed = True
            logger.warning(NOT_SHOWN)

    def _settle(self) -> None:
        while self._finished:
            call, wrong = self._finished.pop()
            if bool(wrong):
                self.fail()
            else:
                self._shown.add(call)


class CheckedRows:
    """Rows of a batch whose kind of call is not verified yet: each layer finds its own and compares them.

    Args:
        claimed: the rows that the batch shows.
        finish: called once all layers have run, with whether one of them found another row (bool []).

    Attributes:
        claimed: as given.
        num_rows, num_pooled: see `BatchRows`.
    """

    def __init__(self, claimed: BatchRows, finish: Callable[[Tensor], None]):
        self.claimed, self.num_rows, self.num_pooled = claimed, claimed.num_rows, claimed.num_pooled
        self._finish = finish
        self._asked = self._answered = 0
        self._wrong: Tensor | None = None

    def of_layers(self, *, behind_attention: bool) -> Rows:
        """Returns a selector for layers whose output will get a gradient."""
        self._asked += 1
        claimed = self.claimed.of_layers(behind_attention=behind_attention)
        return lambda douts_NM: self._found(douts_NM, claimed)

    @property
    def of_norms(self) -> None:
        """Norms compute all rows."""
        return None

    def _found(self, douts_NM: tuple[Tensor, ...], claimed: Rows) -> ActiveRows:
        found_N = nonzero_rows(*douts_NM)
        if not callable(claimed):
            wrong = (found_N & _left_out(claimed, found_N)).any()
            self._wrong = wrong if self._wrong is None else self._wrong | wrong
        self._answered += 1
        # A backward pass through a part of the graph proves nothing.
        if self._answered == self._asked and self._wrong is not None:
            self._finish(self._wrong)
        return select_rows(found_N)


class _Watch:
    """Checks gradients of one call's tensors, and reports at the end of the backward pass."""

    def __init__(self, verification: Verification, *, raises: bool):
        self._verification, self._raises = verification, raises
        self._wrong: Tensor | None = None

    def look_at(self, tensor: Tensor, claimed: Rows | None, num_rows: int) -> None:
        """Checks a tensor's gradient in the backward pass, if it is [B, T, ...] and its rows are known beforehand."""
        is_of_rows = tensor.requires_grad and tensor.dim() > 2 and tensor.shape[:2].numel() == num_rows
        if is_of_rows and isinstance(claimed, ActiveRows | slice):
            tensor.register_hook(lambda gradient: self._look(gradient, claimed))

    def _look(self, gradient: Tensor, claimed: ActiveRows | slice) -> None:
        found_N = nonzero_rows(gradient.reshape(-1, gradient.shape[2:].numel()))
        wrong = (found_N & _left_out(claimed, found_N)).any()
        if self._wrong is None:
            # At the end of the backward pass, so that the host waits for the device only once.
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong

    def _tell(self) -> None:
        wrong, self._wrong = self._wrong, None
        if bool(wrong):
            self._verification.fail()
            if self._raises:
                raise SparsityError(INCOMPLETE)


def _left_out(rows: ActiveRows | slice, like_N: Tensor) -> Tensor:
    """The rows outside of `rows`, bool [N]."""
    if isinstance(rows, ActiveRows):
        return rows.places < 0
    left_out_N = torch.ones_like(like_N)
    left_out_N[rows] = False
    return left_out_N


def _tensors(outputs) -> Iterator[Tensor]:
    """The tensors that an output is or contains."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs]
    yield from (value for value in values if isinstance(value, Tensor))
