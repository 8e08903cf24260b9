"""Checks and times the step of one trainer of peers.py, in a process of its own.

    python -m speed.trainers.process ARM JOB        an arm's name or "reference"; the job as JSON; both from peers.py

Says when everything is imported and waits for a line of input, so that no other process works while it does. Then
prints a line per batch.
"""

import sys

ARM = sys.argv[1] if sys.argv[1:] else ""
if ARM == "unsloth packed":
    from speed.trainers import flash_attn

    flash_attn.install()
if ARM.startswith("unsloth"):
    import unsloth  # noqa: F401  patches transformers, so it must be imported first

import json
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PretrainedConfig

from sebp_edge.engine.models.libraries import without_fla
from sebp_edge.engine.sparse.rows.batches import Batch
from speed.trainers import four_bit
from speed.trainers.arms import ARMS, Arm
from speed.trainers.conditions import conditions
from speed.trainers.reference import Reference, loss_and_gradients, read_references, references, save_references
from speed.trainers.runs import IMPORTED
from speed.trainers.steps import described, trained
from speed.trainers.timer import medians, running, time_steps
from speed.trainers.work import Job, fill, make_base, make_batch, save_base, shape_config, with_adapters

WARM_UPS, REPEATS = 2, 7


def main() -> None:
    job = Job(**json.loads(sys.argv[2]))
    print(IMPORTED, flush=True)
    if not sys.stdin.readline():
        sys.exit("peers.py has ended")
    if ARM == "reference":
        make_reference(job)
        return
    for row in measure(ARMS[ARM], job):
        print(json.dumps(row), flush=True)


def make_reference(job: Job) -> None:
    """Writes the reference for each batch into the job's folder, and the base model too if an arm needs its files."""
    with without_fla():
        base = make_base(job)
    if job.save_model:
        save_base(base, job)
    if job.four_bit:
        four_bit.round_(base)
    model = with_adapters(base, job)
    fill(trained(model))
    save_references(references(model, make_batch(max(job.batches), job), job.batches), job)


def measure(arm: Arm, job: Job, repeats: int = REPEATS) -> Iterator[dict]:
    """One row per batch: `status` is "ok", or the reason why there is no time."""
    model, expected = arm.load(job), read_references(job)
    for count in job.batches:
        batch = make_batch(count, job)
        row = {"texts": count, "tokens": int(batch.attention_mask.sum())}
        if count > arm.max_texts:
            yield row | {"status": f"not run with more than {arm.max_texts} texts"}
            continue
        try:
            row |= measure_batch(arm, model, batch, expected[count], repeats, shape_config(job.shape))
        except torch.OutOfMemoryError:
            row |= {"status": "out of memory"}
        except Exception as error:
            # Peers fail with errors of many kinds; the row reports it, and the other batches go on.
            row |= {"status": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        yield row


def measure_batch(
    arm: Arm, model: nn.Module, batch: Batch, reference: Reference, repeats: int, config: PretrainedConfig
) -> dict:
    model.zero_grad(set_to_none=True)
    parameters = trained(model)
    # The previous batch has changed the weights.
    fill(parameters)
    with running(model, batch, arm.variant) as step:
        loss, gradients = loss_and_gradients(step, model)
        found = reference.deviation(loss, gradients)
        row = {"loss": loss, "gradient_error": found.gradient_error, "allowed_error": reference.allowed.gradient_error}
        wrong = reference.describe_error(found)
        if wrong is not None:
            return row | {"status": f"wrong: {wrong}"}
        times = medians(time_steps(step, batch.input_ids.device, warm_ups=WARM_UPS, repeats=repeats))
        row |= described(step.moments()) | {"trained_bytes": sum(each.nbytes for each in parameters)}
        if batch.input_ids.is_cuda:
            row |= conditions(step, config, int(batch.attention_mask.sum()))
    peak = None if times.peak_bytes is None else times.peak_bytes / 2**30
    return row | {"status": "ok", "step_ms": 1e3 * times.step, "peak_gib": peak}


if __name__ == "__main__":
    main()
