"""Checks and times the step of one trainer of peers.py, in a process of its own.

    python kernels/bench/peer_process.py ARM JOB        an arm's name or "reference"; the job as JSON, from peers.py

Prints one line per batch. The reference is the loss and the gradients in fp32, one text at a time.
"""

import sys

if sys.argv[1:] and sys.argv[1].startswith("unsloth"):
    import unsloth  # noqa: F401  patches transformers, so it must be imported first

import json
from collections.abc import Iterator

import torch
from torch import nn

from peer_arms import ARMS, Arm
from peer_work import Job, fill, make_base, make_batch, save_base, with_adapters
from sebp_edge.insight.bench.correctness import Deviation, Reference, loss_and_gradients
from sebp_edge.insight.bench.timer import medians, running, time_steps
from sebp_edge.insight.bench.variants import trained
from sebp_edge.texts.batches import Batch

WARM_UPS, REPEATS = 2, 7
# The largest accepted relative error of a loss in bf16.
LOSS_TOLERANCE = 0.005


def main() -> None:
    name, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    if name == "reference":
        make_reference(job)
        return
    for row in measure(ARMS[name], job):
        print(json.dumps(row), flush=True)


def make_reference(job: Job) -> None:
    """Writes the reference for each batch into the job's folder, and the base model too if an arm needs its files."""
    base = make_base(job)
    if job.save_model:
        save_base(base, job)
    model = with_adapters(base, job)
    fill(trained(model))
    references = {count: Reference.of(model, make_batch(count, job), LOSS_TOLERANCE) for count in job.batches}
    # Plain values can be read without pickle.
    values = {count: vars(each) | {"allowed": vars(each.allowed)} for count, each in references.items()}
    torch.save(values, job.reference)


def read_references(job: Job) -> dict[int, Reference]:
    values = torch.load(job.reference, weights_only=True)
    return {count: Reference(**each | {"allowed": Deviation(**each["allowed"])}) for count, each in values.items()}


def measure(arm: Arm, job: Job) -> Iterator[dict]:
    """One row per batch: `status` is "ok", or the reason why there is no time."""
    model, references = arm.load(job), read_references(job)
    for count in job.batches:
        batch = make_batch(count, job)
        row = {"texts": count, "tokens": int(batch.attention_mask.sum())}
        if count > arm.max_texts:
            yield row | {"status": f"not run with more than {arm.max_texts} texts"}
            continue
        try:
            row |= measure_batch(arm, model, batch, references[count])
        except torch.OutOfMemoryError:
            row |= {"status": "out of memory"}
        except Exception as error:
            # Peers fail with errors of many kinds; the row reports it, and the other batches go on.
            row |= {"status": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        yield row


def measure_batch(arm: Arm, model: nn.Module, batch: Batch, reference: Reference) -> dict:
    model.zero_grad(set_to_none=True)
    # The previous batch has changed the weights.
    fill(trained(model))
    with running(model, batch, arm.variant) as step:
        loss, gradients = loss_and_gradients(step, model)
        found = reference.deviation(loss, gradients)
        row = {"loss": loss, "gradient_error": found.gradient_error, "allowed_error": reference.allowed.gradient_error}
        wrong = reference.describe_error(found)
        if wrong is not None:
            return row | {"status": f"wrong: {wrong}"}
        times = medians(time_steps(step, batch.input_ids.device, warm_ups=WARM_UPS, repeats=REPEATS))
    peak = None if times.peak_bytes is None else times.peak_bytes / 2**30
    return row | {"status": "ok", "step_ms": 1e3 * times.step, "peak_gib": peak}


if __name__ == "__main__":
    main()
