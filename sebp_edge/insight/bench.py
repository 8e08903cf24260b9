"""Times training steps side by side, and refuses to time what is wrong.

All ways of running a model are measured in one process on the same batches, in turns, so that a machine whose speed
drifts slows all of them alike. Before anything is timed, the gradients of each are held against the dense ones.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.errors import SebpEdgeError
from sebp_edge.models.machine import synchronize
from sebp_edge.sparse.active_tokens import ActiveTokens
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Batch


class WrongGradients(SebpEdgeError):
    """What was to be timed does not compute what the dense model computes."""


@dataclass(frozen=True)
class Way:
    """A way of running a model on padded batches.

    Attributes:
        name: for the table.
        attach: prepares a model for it; the context manager takes that back.
        loss: the mean loss of a batch, with what `attach` gave.
    """

    name: str
    attach: Callable[[nn.Module], AbstractContextManager]
    loss: Callable[[object, Batch], Tensor]

    def add_gradients(self, handle, batch: Batch) -> None:
        """Adds the gradients of that loss to the parameters' `grad`."""
        self.loss(handle, batch).backward()


class _Dense:
    def __init__(self, model: nn.Module):
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None: ...


def _padded_loss(handle, batch: Batch) -> Tensor:
    """As any training loop calls a transformers model."""
    return handle.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels, use_cache=False
    ).loss


def _hoisted_loss(handle: Hoisted, batch: Batch) -> Tensor:
    return handle.row_losses(ActiveTokens.gather(batch.input_ids, batch.plan)).mean()


DENSE = Way("dense, padded", _Dense, _padded_loss)
DROP_IN = Way("drop-in", Sparsified, _padded_loss)
WAYS = (DENSE, DROP_IN, Way("hoisted", Hoisted, _hoisted_loss))


@dataclass(frozen=True)
class Timing:
    """Median seconds of one micro-batch, by part.

    Attributes:
        gradient_error: norm of the difference to the right gradients over their norm.
        peak_bytes: most that torch's allocator held on a GPU during these steps; 0 elsewhere.
    """

    way: str
    forward: float
    backward: float
    step: float
    gradient_error: float
    peak_bytes: int


def time_steps(model: nn.Module, batches: list[Batch], ways=WAYS, *, rounds: int = 7, tolerance: float) -> list[Timing]:
    """Times a training step of each way on each of `batches`, in turns.

    Args:
        model: on its device, with the parameters to train requiring gradients; they are trained on the way.
        batches: on the model's device.
        ways: what to compare; the dense one is always the reference.
        rounds: how often each batch is run by each way; each time after one step that is not timed.
        tolerance: largest relative error of the gradients that is still called right.

    Raises:
        WrongGradients: a way's gradients are off by more than `tolerance`.
    """
    errors = {way.name: _gradient_error(model, way, batches[0]) for way in ways}
    for name, error in errors.items():
        if not error <= tolerance:
            raise WrongGradients(f"{name}: gradients differ from dense ones by {error:.1e}, above {tolerance:.0e}.")
    return time_in_turns(model, batches, ways, errors, rounds=rounds)


def time_in_turns(
    model: nn.Module, batches: list[Batch], ways, errors: dict[str, float], *, rounds: int = 7
) -> list[Timing]:
    """As `time_steps`, of ways whose gradients have been held against right ones: `errors`, by the ways' names."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    samples: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in ways}
    peaks = dict.fromkeys(samples, 0)
    for _ in range(rounds):
        for way in ways:
            with way.attach(model) as handle, _peak(batches[0].input_ids.device, peaks, way.name):
                # Every handle's first batch has its trials, which training has once and not in each step.
                _time_one(handle, way, batches[0], optimizer)
                samples[way.name] += [_time_one(handle, way, batch, optimizer) for batch in batches]
    return [
        Timing(
            way.name,
            *(statistics.median(part) for part in zip(*samples[way.name], strict=True)),
            gradient_error=errors[way.name],
            peak_bytes=peaks[way.name],
        )
        for way in ways
    ]


@contextmanager
def _peak(device: torch.device, peaks: dict[str, int], name: str) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield
    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device))


def _time_one(handle, way: Way, batch: Batch, optimizer) -> tuple[float, float, float]:
    device = batch.input_ids.device
    marks = [_now(device)]
    loss = way.loss(handle, batch)
    marks.append(_now(device))
    loss.backward()
    marks.append(_now(device))
    optimizer.step()
    optimizer.zero_grad()
    marks.append(_now(device))
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[0]


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def _gradient_error(model: nn.Module, way: Way, batch: Batch) -> float:
    """Norm of the difference to the dense gradients over their norm, all parameters together."""
    expected, found = (gradients(model, each, batch) for each in (DENSE, way))
    difference = sum(float((one - other).double().square().sum()) for one, other in zip(expected, found, strict=True))
    return (difference / sum(float(one.double().square().sum()) for one in expected)) ** 0.5


def gradients(model: nn.Module, way: Way, batch: Batch) -> list[Tensor]:
    """The gradients of a batch's mean loss, of every trained parameter in the model's order."""
    with way.attach(model) as handle:
        way.add_gradients(handle, batch)
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    return found
