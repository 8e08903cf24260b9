"""Compares all variants on one model and one batch: checks each one, then times the correct ones in turns."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from sebp_edge.errors import CannotCapture, MachineError, SparsityError
from sebp_edge.machine.devices import ran_out_of_memory, release_memory
from sebp_edge.research.bench.correctness import Deviation, Reference, loss_and_gradients
from sebp_edge.research.bench.timer import ROUNDS, Times, medians, running, time_variant
from sebp_edge.research.bench.variants import VARIANTS, Variant
from sebp_edge.texts.batches import Batch
from sebp_edge.training.autograd_queue import AutogradQueue

Status = Literal["ok", "refused", "out of memory", "not available", "failed"]


@dataclass(frozen=True)
class Measurement:
    """The result of one variant.

    Attributes:
        status: "ok", "refused" (its loss or gradients are wrong), "out of memory", "not available" (this machine or
            model cannot run it), or "failed".
        reason: the reason in words; None if the status is "ok" or "out of memory".
        deviation: the errors of its loss and gradients; None if they were not computed.
        times: None unless the status is "ok".
    """

    variant: Variant
    status: Status
    reason: str | None = None
    deviation: Deviation | None = None
    times: Times | None = None


def compare(
    model: nn.Module,
    batch: Batch,
    variants: Iterable[Variant] = VARIANTS,
    *,
    rounds: int = ROUNDS,
    on_progress: Callable[[str], None] = lambda state: None,
) -> list[Measurement]:
    """Measures each of `variants`; one that fails, is wrong or runs out of memory gets no times, and the others go on.

    Args:
        model: a decoder on its device; its trained parameters require gradients, and the timed steps update them.
        batch: right-padded, on the model's device.
        rounds: how often the variants take turns.
    """
    runner = _Runner(model, batch)
    on_progress("computing the fp32 reference")
    reference = runner.run(lambda: Reference.of(model, batch))
    if isinstance(reference, _Failure):
        raise MachineError(
            "The fp32 gradients that all variants are compared with could not be computed "
            f"({reference.reason or 'memory ran out'}); choose a smaller model or shorter texts."
        )
    found = {}
    for variant in variants:
        on_progress(f"checking {variant.name}")
        found[variant.name] = _checked(variant, reference, model, batch, runner)
    del reference
    times: dict[str, list[Times]] = {name: [] for name in found}
    for number in range(1, rounds + 1):
        for name, measurement in found.items():
            if measurement.status == "ok":
                on_progress(f"round {number} of {rounds}: {name}")
                new_times = runner.run(lambda variant=measurement.variant: time_variant(model, batch, variant))
                if isinstance(new_times, _Failure):
                    found[name] = replace(measurement, status=new_times.status, reason=new_times.reason)
                else:
                    times[name] += new_times
    return [
        replace(measurement, times=medians(times[name])) if measurement.status == "ok" else measurement
        for name, measurement in found.items()
    ]


def _checked(variant: Variant, reference: Reference, model: nn.Module, batch: Batch, runner: "_Runner") -> Measurement:
    reason = variant.unsupported_reason(batch.input_ids.device)
    if reason is not None:
        return Measurement(variant, "not available", reason)
    deviation = runner.run(lambda: measure_deviation(variant, reference, model, batch))
    if isinstance(deviation, _Failure):
        return Measurement(variant, deviation.status, deviation.reason)
    error = reference.describe_error(deviation)
    return Measurement(variant, "ok" if error is None else "refused", error, deviation)


def measure_deviation(variant: Variant, reference: Reference, model: nn.Module, batch: Batch) -> Deviation:
    """The errors of a variant's loss and gradients."""
    with running(model, batch, variant) as step:
        return reference.deviation(*loss_and_gradients(step, model))


@dataclass(frozen=True)
class _Failure:
    status: Status
    reason: str | None = None


class _Runner:
    """Runs functions that may fail, and frees the memory that a failure leaves behind."""

    def __init__(self, model: nn.Module, batch: Batch):
        self._model, self._device = model, batch.input_ids.device
        self._autograd_queue = AutogradQueue(self._device)

    def run(self, function: Callable):
        """The result of `function`, or a _Failure if it failed."""
        try:
            return function()
        except (SparsityError, CannotCapture) as error:
            failure = _Failure("not available", str(error).rstrip("."))
        except (RuntimeError, MemoryError, TypeError, ValueError, KeyError) as error:
            if ran_out_of_memory(error):
                failure = _Failure("out of memory")
            else:
                failure = _Failure("failed", f"{type(error).__name__}: {error}".splitlines()[0][:200])
            # The traceback's frames keep computed tensors alive.
            traceback.clear_frames(error.__traceback__)
        self._model.zero_grad()
        self._autograd_queue.clear()
        release_memory(self._device)
        return failure
