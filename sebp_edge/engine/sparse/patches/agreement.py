"""Compares replacements with the model's own code before they are used.

Results are compared by mean difference, gradients by norm. All tolerances are defined here. A verdict must outlive the
weights that it was found with, such as a gate of 0 that a training opens. So which rows depend on each other is found
by gradients that are NaN, since 0 * NaN is NaN, or with weights that are `varied`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.basics.units import percent
from sebp_edge.engine.models.sharding import DTensor, computing_device, computing_dtype
from sebp_edge.engine.sparse.patches.state import without_hooks
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import without_autocast_cache

# Errors of a model's code that is called in an unforeseen way or has unforeseen parts. Running out of memory raises one
# of them too, but proves nothing about the model: see `ran_out_of_memory`.
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError, SparsityError)

# Largest relative differences that rounding alone explains. Of results and gradients in fp32 and fp64:
FULL_PRECISION = 1e-4
# In lower precision or under autocast: of one operation's output, or of a mean of losses, where rounding averages out.
OUTPUTS = 1e-2
# Of an attention block's output: the model's code rounds after every operation between projections, ours only once.
ATTENTION = 0.03
# Of the losses of single rows: the padded model rounds its logits.
ROW_LOSSES = 0.05
# Of hidden states, which are rounded in every layer; a wrong position or head changes them far more.
HIDDEN_STATES = 0.1
# Of the gradient of all hidden states.
GRADIENT = 0.1
# Share of the norm of all gradients, added for parameters whose own gradient is almost zero.
ALL_GRADIENTS = 1e-5

# The most values of a tensor that is varied though it is not all zero, since a copy of it is kept.
_MAX_VARIED = 2**16


def trial_batch(decoder: nn.Module) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [2, 12] on the decoder's device, with rows without a loss between rows with one."""
    # In training, spectral norm would change its vectors when a weight is read.
    with evaluating(decoder):
        embedding = decoder.get_input_embeddings().weight
        head = getattr(decoder.get_output_embeddings(), "weight", embedding)
    input_ids = torch.arange(24, device=computing_device(embedding)).view(2, 12) % min(len(embedding), len(head))
    labels = input_ids.clone()
    labels[0, :4], labels[1, 3:8], labels[:, 10] = IGNORE, IGNORE, IGNORE
    return input_ids, labels


def find_mismatch(
    model: nn.Module,
    expected: Callable[[], Tensor],
    found: Callable[[], Tensor],
    tolerance: float = OUTPUTS,
    *,
    with_hooks: bool = False,
) -> str | None:
    """Returns None if both return the same numbers, else the reason in words. Runs without gradients and dropout.

    An error of the model's code counts as a mismatch; running out of memory is raised. In low precision, the tolerance
    is the largest relative difference.
    """
    try:
        with evaluating(model, with_hooks=with_hooks):
            difference = disagreement(model, expected(), found(), tolerance)
    except FAILURES as error:
        if ran_out_of_memory(error):
            raise
        return f"a trial batch failed ({type(error).__name__}: {error})"
    return None if difference is None else f"results differ by {percent(difference, 2)} on a trial batch"


def disagreement(model: nn.Module, expected: Tensor, found: Tensor, tolerance: float = OUTPUTS) -> float | None:
    """Returns None if the mean difference over the mean result is within tolerance, else that ratio, perhaps NaN."""
    difference = float((found - expected).abs().mean() / expected.abs().mean())
    dtype = computing_dtype(model)
    is_full = dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(expected.device.type)
    return None if difference <= (FULL_PRECISION if is_full else tolerance) else difference


def gradients_agree(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether full-precision gradients agree, each tensor with its counterpart."""
    total = sum(gradient.square().sum() for gradient in expected).sqrt()
    pairs = zip(expected, found, strict=True)
    return all((one - other).norm() <= FULL_PRECISION * one.norm() + ALL_GRADIENTS * total for one, other in pairs)


def reads_other_rows(outputs: Tensor, tensors: Sequence[Tensor], rows: Tensor | slice) -> bool:
    """Whether outputs depend in any way on other rows of these tensors [..., K]; the last dimension is no row."""
    # In anomaly mode, torch refuses NaN.
    with torch.autograd.set_detect_anomaly(False):
        seed = torch.full_like(outputs, torch.nan)
        gradients = torch.autograd.grad(outputs, tensors, seed, retain_graph=True, allow_unused=True)
    reached = [gradient.isnan().any(dim=-1).flatten() for gradient in gradients if gradient is not None]
    for reached_N in reached:
        reached_N[rows] = False
    return any(bool(reached_N.any()) for reached_N in reached)


@contextmanager
def without_main_grads(model: nn.Module) -> Iterator[None]:
    """Context in which no backward pass adds to a parameter's `main_grad`, as fused adapters do."""
    kept = [(each, each.main_grad) for each in model.parameters() if getattr(each, "main_grad", None) is not None]
    for parameter, _ in kept:
        parameter.main_grad = None
    try:
        yield
    finally:
        for parameter, main_grad in kept:
            parameter.main_grad = main_grad


@contextmanager
def graph_cut_after(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """Cuts the graph after an embedding: replaces each output by a leaf, and adds the leaf to the yielded list."""
    embedded: list[Tensor] = []

    def cut(_module, _inputs, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1].clone()  # a model may change it in place, as CTRL does

    handle = embedding.register_forward_hook(cut)
    try:
        yield embedded
    finally:
        handle.remove()


@contextmanager
def varied(model: nn.Module) -> Iterator[None]:
    """Context in which small parameters, and large ones that are all zero, have slightly other values, none zero.

    The values are put back, and autograd does not see that they changed.
    """
    # Wider buffers are masks.
    buffers = (buffer for buffer in model.buffers() if buffer.dim() < 2)
    with ExitStack() as undo, torch.no_grad():
        for tensor in chain(model.parameters(), buffers):
            values = tensor.data.to_local() if isinstance(tensor.data, DTensor) else tensor.data
            if values.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or not values.numel():
                continue
            is_small = values.numel() <= _MAX_VARIED
            if not is_small and (bool(values[0].any()) or bool(values.any())):
                continue
            undo.callback(_put_back, values, values.clone() if is_small else values.new_zeros(()))
            draw = torch.Generator(values.device).manual_seed(0)
            noise = torch.empty_like(values).uniform_(0.01, 0.1, generator=draw)
            values.copy_(torch.where(values == 0, noise, values + values * noise))
        yield


def _put_back(values: Tensor, before: Tensor) -> None:
    # At the end of a backward pass, FSDP frees what it had gathered.
    if values.untyped_storage().size():
        values.copy_(before)


@contextmanager
def evaluating(model: nn.Module, *, with_hooks: bool = False) -> Iterator[None]:
    """Context without gradients and dropout; restores each module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with (
            torch.no_grad(),
            without_autocast_cache(computing_device(next(model.parameters()))),
            nullcontext() if with_hooks else without_hooks(model),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
