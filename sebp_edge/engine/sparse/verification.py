"""Verifies that the rows that a batch's labels or mask exclude carry no gradient.

The first backward pass of each kind of call is verified: every layer detects the non-zero rows of its dL/dY, computes
those, so that gradients equal the dense ones, and compares them with the rows that the batch predicts. Later passes of
that kind compute the predicted rows only. If a pass finds gradient in another row, rows are detected in the backward
pass from then on.

Another loss may be added later. So every pass also checks the gradients of the outputs of the call, such as logits, and
of the first hidden states, which the gradient of every hidden state reaches.

Shapes: B sequences, T positions, N = B*T rows, M columns.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.engine.sparse.rows.batch_rows import BatchRows
from sebp_edge.errors import SparsityError
from sebp_edge.ops import ActiveRows, Rows, nonzero_rows, select_rows
from sebp_edge.ops.rows import skipped_rows

logger = logging.getLogger(__name__)

UNEXPECTED_GRADIENT = (
    "Rows that the labels or the attention mask exclude got a gradient (for example, from another loss on the model's "
    "outputs, or a head that reads more than labelled tokens). From now on, active rows are detected in the backward "
    "pass, which is exact but slower."
)
INCOMPLETE_GRADIENTS = (
    "The gradients of this backward pass are incomplete: a loss reads rows that had no gradient in the first pass. Set "
    "all gradients to zero and repeat the step; from now on, active rows are detected in the backward pass."
)


class VerifiedCalls:
    """Records which kinds of a model's calls were verified; `has_failed` if a pass had gradient in excluded rows."""

    def __init__(self):
        self.has_failed = False
        self._verified: set[Hashable] = set()
        self._results: list[tuple[Hashable, Tensor]] = []

    def check_unless_verified(self, rows: BatchRows, call_kind: Hashable) -> "BatchRows | UnverifiedRows":
        """Returns the batch's rows if this kind of call was verified, else rows that verify them in the backward pass.

        Waits for the device if a check has finished since the last call.
        """
        self._collect_results()
        call_kind = (call_kind, rows.skipped_kinds)
        if call_kind in self._verified:
            return rows
        return UnverifiedRows(rows, call_kind, self._results)

    @contextmanager
    def checking_gradients(
        self, rows: "BatchRows | UnverifiedRows", first_modules: Sequence[nn.Module]
    ) -> Iterator[Callable]:
        """Context for a forward pass; yields a function that takes and returns the outputs of the pass.

        If the backward pass finds gradient in a row that the batch excludes, verification fails; if the layers did not
        compute that row, the backward pass raises a SparsityError. Of the outputs of `first_modules`, which are the
        first hidden states, the first that requires a gradient is checked.
        """
        is_unverified = isinstance(rows, UnverifiedRows)
        predicted = rows.predicted if is_unverified else rows
        gradient_check = _GradientCheck(self, raises=not is_unverified)
        is_found = False

        def register_first(module: nn.Module, inputs: tuple, output) -> None:
            nonlocal is_found
            hidden = next(_tensors(output), None)
            if not is_found and hidden is not None and hidden.requires_grad:
                is_found = True
                gradient_check.register(hidden, predicted.up_to_attention, predicted.num_rows)

        def check_outputs(outputs):
            for output in _tensors(outputs):
                gradient_check.register(output, predicted.after_attention, predicted.num_rows)
            return outputs

        with ExitStack() as undo:
            for module in first_modules:
                undo.callback(module.register_forward_hook(register_first).remove)
            yield check_outputs

    def fail(self) -> None:
        """Makes every later call detect its rows in the backward pass; logs that once."""
        if not self.has_failed:
            self.has_failed = True
            logger.warning(UNEXPECTED_GRADIENT)

    def _collect_results(self) -> None:
        while self._results:
            call_kind, wrong = self._results.pop()
            if bool(wrong):
                self.fail()
            else:
                self._verified.add(call_kind)


class UnverifiedRows:
    """Rows of a batch whose kind of call is not verified yet: each layer detects its own and compares them.

    Once all layers have run, `results` gets the kind, and whether one of them detected another row (bool []).
    """

    up_to_attention = None  # norms compute all rows

    def __init__(self, predicted: BatchRows, call_kind: Hashable, results: list[tuple[Hashable, Tensor]]):
        self.predicted, self.num_rows, self.num_pooled = predicted, predicted.num_rows, predicted.num_pooled
        self._call_kind, self._results = call_kind, results
        self._num_selectors = self._num_finished = 0
        self._wrong: Tensor | None = None

    def linear_rows(self, *, after_attention: bool) -> Rows:
        """Returns a selector for layers whose output requires a gradient."""
        self._num_selectors += 1
        predicted = self.predicted.linear_rows(after_attention=after_attention)
        return lambda douts_NM: self._find_rows(douts_NM, predicted)

    def watch(self, tensor: Tensor) -> Tensor:
        """Returns the input or output of a part of the last layer, whose gradient must be zero but in loss rows."""
        if not tensor.requires_grad:
            return tensor
        self._num_selectors += 1
        predicted, tensor = self.predicted.linear_rows(after_attention=True), tensor.view_as(tensor)
        tensor.register_hook(lambda gradient: self._compare(nonzero_rows(gradient.flatten(0, -2)), predicted))
        return tensor

    def _find_rows(self, douts_NM: tuple[Tensor, ...], predicted: Rows) -> ActiveRows:
        found_N = nonzero_rows(*douts_NM)
        self._compare(found_N, predicted)
        return select_rows(found_N)

    def _compare(self, found_N: Tensor, predicted: Rows) -> None:
        if not callable(predicted):
            wrong = (found_N & skipped_rows(predicted, found_N)).any()
            self._wrong = wrong if self._wrong is None else self._wrong | wrong
        self._num_finished += 1
        # A backward pass through a part of the graph verifies nothing.
        if self._num_finished == self._num_selectors and self._wrong is not None:
            self._results.append((self._call_kind, self._wrong))


class _GradientCheck:
    """Checks gradients of one call's tensors, and reports at the end of the backward pass."""

    def __init__(self, verification: VerifiedCalls, *, raises: bool):
        self._verification, self._raises = verification, raises
        self._wrong: Tensor | None = None

    def register(self, tensor: Tensor, predicted: Rows | None, num_rows: int) -> None:
        """Registers a check of a tensor's gradient, if the tensor is [B, T, ...] and its rows are known beforehand."""
        is_of_rows = tensor.requires_grad and tensor.dim() > 2 and tensor.shape[:2].numel() == num_rows
        if is_of_rows and isinstance(predicted, ActiveRows | slice):
            tensor.register_hook(lambda gradient: self._check(gradient, predicted))

    def _check(self, gradient: Tensor, predicted: ActiveRows | slice) -> None:
        found_N = nonzero_rows(gradient.reshape(-1, gradient.shape[2:].numel()))
        wrong = (found_N & skipped_rows(predicted, found_N)).any()
        if self._wrong is None:
            # At the end of the backward pass, so that the host waits for the device only once.
            torch.autograd.Variable._execution_engine.queue_callback(self._report)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong

    def _report(self) -> None:
        wrong, self._wrong = self._wrong, None
        if bool(wrong):
            self._verification.fail()
            if self._raises:
                raise SparsityError(INCOMPLETE_GRADIENTS)


def _tensors(outputs) -> Iterator[Tensor]:
    """Yields the tensors that an output is or contains."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs]
    yield from (value for value in values if isinstance(value, Tensor))
