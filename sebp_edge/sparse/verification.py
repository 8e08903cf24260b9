"""Whether rows that a batch's labels or mask leave out carry no gradient, as its first backward pass shows.

Rows are believed for a call only once they were shown for one of its kind: in a first backward pass, every layer looks
for the rows of its dL/dY that are not zero, computes with these (so the gradients are the dense ones, whatever was
claimed), and compares them with the claimed rows. From then on, passes of that kind compute the claimed rows only. One
row too few, and no claim of this model is believed any more.

Logits that are returned can be used by anybody at any time, so their gradient is looked at in every later pass too.

Shapes: B sequences, T positions, N = B*T rows, M columns.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import Tensor

from sebp_edge.errors import SparsityError
from sebp_edge.ops import ActiveRows, Rows, nonzero_rows, select_rows
from sebp_edge.sparse.plans import BatchRows

logger = logging.getLogger(__name__)

NOT_SHOWN = (
    "Gradient arrives at rows that the labels or the attention mask leave out (another loss on what the model returns, "
    "or a head that looks at more than labelled tokens). From now on rows are found in the backward pass, which is "
    "exact and slower."
)
INCOMPLETE = (
    "The gradients of this backward pass lack rows: another loss looks at logits of rows without a label, and none did "
    "in the first pass. Set the gradients to zero and repeat the step; from now on rows are found in the backward pass."
)


class Verification:
    """What is known of one model's calls.

    Attributes:
        has_failed: whether a pass had gradient in rows that were claimed to have none.
    """

    def __init__(self):
        self.has_failed = False
        self._shown: set[Hashable] = set()
        self._finished: list[tuple[Hashable, Tensor]] = []

    def checked(self, rows: BatchRows, call: Hashable) -> "BatchRows | CheckedRows":
        """The rows themselves if they were shown for such a call, else rows that check them in the backward pass.

        Waits for the device where a check has finished since the last call.
        """
        self._settle()
        call = (call, rows.leaves_out)
        return rows if call in self._shown else CheckedRows(rows, lambda wrong: self._finished.append((call, wrong)))

    def watch(self, outputs, rows: BatchRows) -> None:
        """Looks at the gradient of each returned tensor [B, T, ...] in the backward pass.

        There a SparsityError is raised if a row has gradient that no layer has computed.
        """
        watch = _Watch(self, rows)
        for output in _tensors(outputs):
            if output.requires_grad and output.dim() > 2 and output.shape[:2].numel() == rows.num_rows:
                output.register_hook(watch.look)

    def fail(self) -> None:
        """Believes no claim any more."""
        self.has_failed = True

    def _settle(self) -> None:
        while self._finished:
            call, wrong = self._finished.pop()
            if not bool(wrong):
                self._shown.add(call)
            elif not self.has_failed:
                self.fail()
                logger.warning(NOT_SHOWN)


class CheckedRows:
    """The rows of one batch that are still to be shown: each layer finds its own, and checks the claimed ones.

    Attributes:
        num_rows, num_pooled: as those of BatchRows.
    """

    def __init__(self, claimed: BatchRows, finish):
        self.num_rows, self.num_pooled = claimed.num_rows, claimed.num_pooled
        self._claimed, self._finish = claimed, finish
        self._asked = self._answered = 0
        self._wrong: Tensor | None = None

    def of_layers(self, *, behind_attention: bool) -> Rows:
        """A selector for layers whose output will get a gradient."""
        self._asked += 1
        claimed = self._claimed.of_layers(behind_attention=behind_attention)
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
        # A backward pass of a part of the graph shows nothing.
        if self._answered == self._asked and self._wrong is not None:
            self._finish(self._wrong)
        return select_rows(found_N)


class _Watch:
    """Looks at the gradients of what one call returned."""

    def __init__(self, verification: Verification, rows: BatchRows):
        self._verification, self._read = verification, rows.behind_attention
        self._wrong: Tensor | None = None

    def look(self, gradient: Tensor) -> None:
        found_N = nonzero_rows(gradient.reshape(-1, gradient.shape[2:].numel()))
        wrong = (found_N & _left_out(self._read, found_N)).any()
        if self._wrong is None:
            # At its end, so that the host waits for the device once.
            torch.autograd.Variable._execution_engine.queue_callback(self._decide)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong

    def _decide(self) -> None:
        wrong, self._wrong = self._wrong, None
        if bool(wrong):
            self._verification.fail()
            raise SparsityError(INCOMPLETE)


def _left_out(rows: ActiveRows | slice, like_N: Tensor) -> Tensor:
    """bool [N]."""
    if isinstance(rows, ActiveRows):
        return rows.places < 0
    left_out_N = torch.ones_like(like_N)
    left_out_N[rows] = False
    return left_out_N


def _tensors(outputs) -> Iterator[Tensor]:
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs]
    yield from (value for value in values if isinstance(value, Tensor))
