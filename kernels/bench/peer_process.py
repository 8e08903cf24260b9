"""One trainer of peers.py, in a process of its own: first whether its step is right, then how long it takes.

    python kernels/bench/peer_process.py ARM JOB        an arm's name or "reference"; the job as JSON, from peers.py

Prints a line for each batch. What is right: loss and gradients of an fp32 copy that is given one text at a time.
"""

import sys

if sys.argv[1:] and sys.argv[1].startswith("unsloth"):
    import unsloth  # noqa: F401  changes transformers, and has to come before it

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from peer_arms import ARMS, Arm, packed
from peer_work import Job, fill, make_base, make_texts, save_base, with_adapters
from sebp_edge.machine.devices import synchronize

WARM_UPS, REPEATS = 2, 7
# The relative error of a loss in bf16 that is still called right.
LOSS_TOLERANCE = 0.005
# So many gradients of each parameter are compared, evenly spread.
SAMPLE = 4096


def main() -> None:
    name, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    if name == "reference":
        make_reference(job)
        return
    for row in measure(ARMS[name], job):
        print(json.dumps(row), flush=True)


def make_reference(job: Job) -> None:
    """Writes what is right for each batch into the job's folder: loss, sampled gradients, and how far these may be off.

    The weights are those of the arms. They are computed with in fp32, and in the arms' precision to see how much that
    errs. Leaves the model in the folder too, if an arm needs its files.
    """
    base = make_base(job)
    if job.save_model:
        save_base(base, job)
    model = with_adapters(base, job)
    fill(list(trained(model).values()))
    rounded = {count: text_by_text(model, count, job)[1] for count in job.batches}
    model.float()
    reference = {}
    for count in job.batches:
        loss, gradients = text_by_text(model, count, job)
        # As models.py allows it.
        tolerance = 2 * gradient_error(rounded[count], gradients) + 1e-4
        reference[count] = {"loss": loss, "gradients": gradients, "tolerance": tolerance}
    torch.save(reference, job.reference)


def text_by_text(model: nn.Module, count: int, job: Job) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a batch's loss rows and its sampled gradients."""
    texts = make_texts(count, job)
    num_targets = sum(text.num_loss_tokens for text in texts)
    model.zero_grad()
    total = 0.0
    for text in texts:
        loss = model(**packed([text], job), use_cache=False).loss * (text.num_loss_tokens / num_targets)
        loss.backward()
        total += float(loss.detach())
    return total, sampled_gradients(model)


def measure(arm: Arm, job: Job) -> Iterator[dict]:
    """One row for each batch: `status` is "ok", or why there is no time."""
    model, step_of = arm.load(job)
    reference = torch.load(job.reference)
    for count in job.batches:
        row = {"texts": count, "tokens": sum(len(text.input_ids) for text in make_texts(count, job))}
        if count > arm.most_texts:
            yield row | {"status": f"not run with more than {arm.most_texts} texts"}
            continue
        try:
            row |= measure_batch(arm, job, model, step_of, count, reference[count])
        except torch.OutOfMemoryError:
            row |= {"status": "out of memory"}
        except Exception as error:
            # Peers fail in ways of their own; a row says so, and the other batches go on.
            row |= {"status": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        yield row


def measure_batch(arm: Arm, job: Job, model: nn.Module, step_of: Callable, count: int, expected: dict) -> dict:
    device = torch.device(job.device)
    model.zero_grad(set_to_none=True)
    parameters = list(trained(model).values())
    _forget_peak(device)
    step = step_of(arm.lay_out(make_texts(count, job), job))
    fill(parameters)
    loss = float(step.gradients())
    error = gradient_error(sampled_gradients(model), expected["gradients"])
    step.zero_grad()
    row = {"loss": loss, "gradient_error": error, "allowed_error": expected["tolerance"]}
    wrong = what_is_wrong(loss, error, expected)
    if wrong is not None:
        return row | {"status": f"wrong: {wrong}"}
    for _ in range(WARM_UPS):
        step()
    times = [_seconds(step, device) for _ in range(REPEATS)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return row | {"status": "ok", "step_ms": 1e3 * statistics.median(times), "peak_gib": peak}


def what_is_wrong(loss: float, error: float, expected: dict) -> str | None:
    """In words, what is too far from the reference; None where nothing is."""
    if not abs(loss / expected["loss"] - 1) <= LOSS_TOLERANCE:
        return f"its loss is {loss:.4f}, not {expected['loss']:.4f}"
    if not error <= expected["tolerance"]:
        return f"its gradients are off by {error:.1e}, above {expected['tolerance']:.1e}"
    return None


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sampled_gradients(model: nn.Module) -> dict[str, Tensor]:
    """At most about SAMPLE gradients of each parameter, in fp32 on the CPU, by the parameters' names."""
    return {
        name: parameter.grad.flatten()[:: max(1, parameter.numel() // SAMPLE)].float().cpu()
        for name, parameter in trained(model).items()
    }


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    if found.keys() != expected.keys():
        raise ValueError(f"it trains other parameters, such as {sorted(found.keys() ^ expected.keys())[0]}")
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (difference / sum(float(each.double().square().sum()) for each in expected.values())) ** 0.5


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
