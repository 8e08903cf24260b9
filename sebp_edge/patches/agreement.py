"""A trial on one small input: do two ways of computing a decoder's losses, or a module's output, agree?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import casting_anew, ran_out_of_memory
from sebp_edge.rows.row_plan import IGNORE

# Two ways of computing the same round differently.
TOLERANCE, TOLERANCE_LOW_PRECISION = 1e-4, 1e-2


def trial_batch(decoder: nn.Module) -> tuple[Tensor, Tensor]:
    """Token ids and labels [2, 12] on the decoder's device; some rows have a loss, among them, before and after rows
    that have none."""
    embedding, head = decoder.get_input_embeddings().weight, decoder.get_output_embeddings().weight
    input_ids = torch.arange(24, device=embedding.device).view(2, 12) % min(len(embedding), len(head))
    labels = input_ids.clone()
    labels[0, :4], labels[1, 3:8], labels[:, 10] = IGNORE, IGNORE, IGNORE
    return input_ids, labels


def why_not(
    model: nn.Module,
    expected: Callable[[], Tensor],
    found: Callable[[], Tensor],
    low_precision: float = TOLERANCE_LOW_PRECISION,
) -> str | None:
    """None if both give the same numbers, else the reason in words. Runs without gradients and without dropout.

    Args:
        low_precision: the mean error over the mean that is still called the same in less than fp32.
    """
    try:
        with evaluating(model):
            wanted, got = expected(), found()
            difference = float((got - wanted).abs().mean() / wanted.abs().mean())
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, SparsityError) as error:
        if ran_out_of_memory(error):
            raise
        return f"a trial batch failed ({type(error).__name__}: {error})"
    dtype = next(model.parameters()).dtype
    full = dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(wanted.device.type)
    if difference <= (TOLERANCE if full else low_precision):
        return None
    return f"on a trial batch they differ by {difference:.1%}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and without dropout; afterwards each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), casting_anew(next(model.parameters()).device):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
