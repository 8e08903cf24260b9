"""Do two ways of computing the same agree? What takes the place of a model's own code is compared with it first.

Results are compared by their mean difference, gradients by their norms; all tolerances stand here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import casting_anew, ran_out_of_memory
from sebp_edge.rows.row_plan import IGNORE

# What a model's code raises when it is called in a way, or has parts, that nobody thought of. Memory that runs out is
# among them and says nothing of the model: see `ran_out_of_memory`.
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError, SparsityError)

# Relative differences that come from rounding alone. In fp32 and fp64, of results and of gradients:
FULL_PRECISION = 1e-4
# In less than that, or under autocast: of one operation's output, or of a mean of losses, where rounding averages out.
OUTPUTS = 1e-2
# Of a block that rounds after every operation between its projections, where ours rounds once.
ATTENTION = 0.03
# Of each row's loss, where the padded model rounds its logits.
ROW_LOSSES = 0.05
# Of hidden states, rounded in every layer; a wrong position or head gives other numbers altogether.
HIDDEN_STATES = 0.1
# Of the norm of all gradients, for parameters that have hardly any.
ALL_GRADIENTS = 1e-5


def trial_batch(decoder: nn.Module) -> tuple[Tensor, Tensor]:
    """Token ids and labels [2, 12] on the decoder's device; some rows have a loss, among them, before and after rows
    that have none."""
    embedding, head = decoder.get_input_embeddings().weight, decoder.get_output_embeddings().weight
    input_ids = torch.arange(24, device=embedding.device).view(2, 12) % min(len(embedding), len(head))
    labels = input_ids.clone()
    labels[0, :4], labels[1, 3:8], labels[:, 10] = IGNORE, IGNORE, IGNORE
    return input_ids, labels


def why_not(
    model: nn.Module, expected: Callable[[], Tensor], found: Callable[[], Tensor], tolerance: float = OUTPUTS
) -> str | None:
    """None if both give the same numbers, else the reason in words. Runs without gradients and without dropout.

    Args:
        model: whose parts compute both.
        expected: is called before `found`.
        tolerance: in low precision.
    """
    try:
        with evaluating(model):
            difference = disagreement(model, expected(), found(), tolerance)
    except FAILURES as error:
        if ran_out_of_memory(error):
            raise
        return f"a trial batch failed ({type(error).__name__}: {error})"
    return None if difference is None else f"on a trial batch they differ by {difference:.1%}"


def disagreement(model: nn.Module, expected: Tensor, found: Tensor, tolerance: float = OUTPUTS) -> float | None:
    """The mean difference of a model's results over the mean result, if it is beyond what rounding explains, or NaN.

    Args:
        tolerance: in low precision.
    """
    difference = float((found - expected).abs().mean() / expected.abs().mean())
    dtype = next(model.parameters()).dtype
    full = dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(expected.device.type)
    return None if difference <= (FULL_PRECISION if full else tolerance) else difference


def gradients_agree(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether gradients in full precision are the same."""
    total = sum(gradient.square().sum() for gradient in expected).sqrt()
    pairs = zip(expected, found, strict=True)
    return all((one - other).norm() <= FULL_PRECISION * one.norm() + ALL_GRADIENTS * total for one, other in pairs)


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
