"""Times steps of a 3B decoder on one and on two GPUs of one host: DDP and FSDP2, each dense and with sparsify.

    python kernels/bench/speed/several_gpus.py [--record [FILE]]
    python kernels/bench/speed/several_gpus.py --tiny              a small shape in two processes on the CPU, to try it

The model has the shape of Llama-3.2-3B and random bf16 weights, all of them trained by AdamW in bf16. Each GPU has its
own padded batch, so two GPUs compute twice the tokens. Before anything is timed, each variant's gradients are compared
with those of one process on the whole batch in fp32; in bf16 they may err by twice as much as a dense process.
A step is timed until the slowest GPU is done, as the median of several; the peak is that of torch's
allocator, on the GPU with the highest one.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))


import evidence
from models import TINY, Case, WrongGradients, known_config, make_batch, make_model
from sebp_edge import sparsify
from sebp_edge.machine.devices import release_memory, synchronize
from sebp_edge.research.bench.correctness import Gradients, Reference, sample
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

GPUS = 2
LEARNING_RATE = 1e-5
SAMPLES, WARM_UPS = 5, 3
VARIANTS = ("dense", "sparsify")
IMPORTED_ONCE = ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama")
SOURCES = (
    *evidence.STEP,
    "kernels/bench/lengths.json",
    "kernels/bench/models.py",
    __file__,
)


class Training(NamedTuple):
    """One way to train a model on this process's device.

    Attributes:
        model: the wrapped model.
        optimizer: has the learning rates.
        backward: computes the gradients of a loss.
        step: updates the weights and sets gradients to zero.
        gradients: samples the gradients, which all processes share.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], object]
    step: Callable[[], object]
    gradients: Callable[[], Gradients]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    if not options.tiny and torch.cuda.device_count() < GPUS:
        parser.error(f"{GPUS} GPUs are needed, and there are {torch.cuda.device_count()}; --tiny runs on the CPU.")
    rows = [row for count in (1, GPUS) for row in launch(count, tiny=options.tiny)]
    if options.record:
        evidence.record("several-gpus", SOURCES, rows, options.record)


def the_case(*, tiny: bool) -> Case:
    """The model, and the batch of each GPU."""
    if tiny:
        return Case("tiny Llama", LlamaConfig(vocab_size=320, num_key_value_heads=2, **TINY), "PTB", 2, 96, target=1.0)
    return Case("Llama-3.2-3B", known_config("llama-3.2-3b"), "WikiText-2", 8, 2048, target=1.0)


def launch(count: int, *, tiny: bool) -> list[dict]:
    """Measures in `count` processes; returns the rows.

    Raises:
        WrongGradients: a variant's gradients are wrong.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        results = Path(folder) / "rows.json"
        # They are forked from one process that has the imports, and has not used a GPU.
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
        arguments = count, port, str(results), tiny
        torch.multiprocessing.start_processes(_measure_in_process, arguments, count, start_method="forkserver")
        return json.loads(results.read_text())


def _measure_in_process(rank: int, count: int, port: int, results: str, tiny: bool) -> None:
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    if tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if tiny else "nccl")
    rows = []
    for row in measure(the_case(tiny=tiny), device):
        rows.append(row)
        if rank == 0:
            show(row)
    if rank == 0:
        Path(results).write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def ways() -> dict[str, Callable[[nn.Module], Training]]:
    """The ways to train on the present number of GPUs."""
    if distributed.get_world_size() == 1:
        return {"one GPU": plain}
    return {"DDP": ddp, "FSDP2": fsdp_2}


def measure(case: Case, device: torch.device) -> Iterator[dict]:
    """One row for each way and variant, the same in each process.

    Raises:
        WrongGradients: a variant's gradients are wrong.
    """
    count, rank = distributed.get_world_size(), distributed.get_rank()
    torch.manual_seed(0)
    # The first rows of the largest batch, so that a GPU's texts are the same whatever the number of GPUs.
    largest, _ = make_batch(replace(case, batch_size=GPUS * case.batch_size), device)
    whole = part_of(largest, 0, count * case.batch_size)
    batch = part_of(whole, rank * case.batch_size, case.batch_size)
    reference = Reference.of(fresh_model(case, device), with_mask(whole))
    release_memory(device)
    for way, wrap in ways().items():
        for variant in VARIANTS:
            model = fresh_model(case, device)
            with sparsify(model) if variant == "sparsify" else nullcontext():
                training = wrap(model)
                error = gradient_error(training, batch, num_items(whole) / count, reference, f"{way}, {variant}")
                reset_peak(device)
                step_ms = time_step(training, batch, num_items(whole) / count, device)
            yield {
                "model": case.model,
                "texts": case.texts,
                "gpus": count,
                "batch_size": case.batch_size,
                "context_length": case.context_length,
                "tokens": int((whole.labels != IGNORE).sum()),
                "way": way,
                "variant": variant,
                "step_ms": largest_of(step_ms, device),
                "peak_gib": largest_of(peak_gib(device), device),
                "gradient_error": error,
            }
            del model, training
            release_memory(device)


def part_of(batch: Batch, begin: int, size: int) -> Batch:
    rows = slice(begin, begin + size)
    return Batch(batch.input_ids[rows], None, batch.labels[rows], plan=None)


def with_mask(batch: Batch) -> Batch:
    """The batch with an attention mask, in which the reference finds the texts' lengths."""
    return Batch(batch.input_ids, (batch.labels != IGNORE).long(), batch.labels, plan=None)


def num_items(batch: Batch) -> int:
    return int((batch.labels[:, 1:] != IGNORE).sum())


def fresh_model(case: Case, device: torch.device) -> nn.Module:
    """The same random model each time, in each process."""
    torch.manual_seed(1)
    return make_model(case.config, device).train()


def plain(model: nn.Module) -> Training:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=parameters[0].is_cuda)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, Tensor.backward, step, lambda: sampled(model))


def ddp(model: nn.Module) -> Training:
    return plain(DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp_2(model: nn.Module) -> Training:
    for block in model.model.layers:
        fully_shard(block)
    return plain(fully_shard(model))


def sampled(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name.removeprefix("module.")] = sample(whole)
    return found


def loss_of(training: Training, batch: Batch, items: float) -> Tensor:
    """The sum of the batch's losses over `items`: gradients are averaged over processes."""
    return training.model(
        input_ids=batch.input_ids,
        labels=batch.labels,
        num_items_in_batch=torch.tensor(items, device=batch.labels.device),
    ).loss


def gradient_error(training: Training, batch: Batch, items: float, reference: Reference, what: str) -> float:
    """The gradients' error relative to the norm of the reference; leaves weights as they were.

    Raises:
        WrongGradients: the loss or the gradients are off by more than the reference allows.
    """
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    # The drop-in detects its rows in its first pass. Only later passes are timed, so one of those is checked.
    for _ in range(2):
        loss = loss_of(training, batch, items)
        training.backward(loss)
        gradients = training.gradients()
        training.step()
    for group in training.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    found = reference.deviation(float(mean) / distributed.get_world_size(), gradients)
    problem = reference.describe_error(found)
    if problem is not None:
        raise WrongGradients(f"{what}: {problem}.")
    return found.gradient_error


def time_step(training: Training, batch: Batch, items: float, device: torch.device) -> float:
    """Median milliseconds of a step of this process."""
    samples = []
    for _ in range(WARM_UPS + SAMPLES):
        synchronize(device)
        distributed.barrier()
        begin = time.perf_counter()
        training.backward(loss_of(training, batch, items))
        training.step()
        synchronize(device)
        samples.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(samples[WARM_UPS:])


def reset_peak(device: torch.device) -> None:
    release_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def largest_of(value: float | None, device: torch.device) -> float | None:
    """The largest value of all processes."""
    if value is None:
        return None
    values = torch.tensor([value], dtype=torch.float64, device=device)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    return float(values)


def show(row: dict) -> None:
    about = f"{row['gpus']} x {row['batch_size']} x {row['context_length']}, {row['way']}, {row['variant']}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
    print(
        f"{about:44}{row['step_ms']:>10.1f} ms{peak:>14}   gradients are off by {row['gradient_error']:.1e}", flush=True
    )


if __name__ == "__main__":
    main()
