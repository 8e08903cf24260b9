"""Times DeepSpeed's ZeRO-2 with optimizer states on the host, as in the paper's tables, and the dense step.

    pip install deepspeed
    python kernels/bench/zero_offload.py [--record [FILE]]
    python kernels/bench/zero_offload.py --tiny              a small shape on the CPU, to try it

Models and batches come from `models`: random bf16 weights, all trained, texts padded to the context length. Dense is
PyTorch with its fused AdamW on the GPU. DeepSpeed is one process with ZeRO stage 2 and PyTorch's AdamW in fp32 on the
host, because its own AdamW needs a compiler: so forward and backward can be compared, but its step is not at its best.
Its gradients are compared with the dense ones before the first update. Each part is timed until the GPU is done, as the
median of several; the peak is that of torch's allocator.
"""

import argparse
import copy
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import BertConfig

import evidence
from models import TINY, Case, WrongGradients, known_config, make_batch, make_model
from sebp_edge.machine.devices import release_memory, synchronize
from sebp_edge.texts.batches import Batch

PARTS = ("forward", "backward", "step")
SAMPLES = 5
LEARNING_RATE = 1e-5
# Both sum the same products in bf16, possibly in another order.
ALLOWED_ERROR = 1e-2
SOURCES = ("kernels/bench/lengths.json", "kernels/bench/models.py", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    if importlib.util.find_spec("deepspeed") is None:
        parser.error("DeepSpeed is not installed: pip install deepspeed")
    device = torch.device("cpu" if options.tiny else "cuda")
    set_single_process_environment(device)
    print(f"{'':44}{'':12}{'forward':>10}{'backward':>10}{'step':>12}{'GiB':>8}   ms")
    rows = []
    for case in tiny_cases() if options.tiny else cases():
        for row in measure(case, device):
            show(row)
            rows.append(row)
    if options.record:
        evidence.record("zero-offload", SOURCES, rows, options.record)


def cases() -> Iterator[Case]:
    for batch_size in (32, 64):
        yield Case("BERT-base", BertConfig(), "SST-2", batch_size, 512, target=1.0)
    yield Case("Llama-3.2-3B", known_config("llama-3.2-3b"), "WikiText-2", 1, 4096, target=1.0)


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny BERT", BertConfig(vocab_size=320, **TINY), "CoLA", 3, 64, target=1.0)


def set_single_process_environment(device: torch.device) -> None:
    """Sets the environment variables that a launcher would set for a single process."""
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    for name, value in (environment | {"DS_ACCELERATOR": device.type}).items():
        os.environ.setdefault(name, value)


def measure(case: Case, device: torch.device) -> Iterator[dict]:
    """One row for the dense step, and one for DeepSpeed's.

    Raises:
        WrongGradients: DeepSpeed's gradients differ from the dense ones.
    """
    torch.manual_seed(0)
    model, (batch, tokens) = make_model(case.config, device), make_batch(case, device)
    about = {"model": case.model, "texts": case.texts, "batch_size": case.batch_size, "tokens": tokens}
    about["context_length"] = case.context_length
    # The dense gradients, without dropout, wait on the host: the GPU may have no room for both models' gradients.
    model.eval()
    loss_of(model, batch).backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters()]
    model_copy = copy.deepcopy(model).cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    model.zero_grad()
    yield (
        about
        | {"variant": "dense"}
        | time_parts(device, model, batch, torch.Tensor.backward, optimizer.step, model.zero_grad)
    )
    del model, optimizer
    release_memory(device)
    engine = with_zero_2(model_copy.to(device), case.batch_size)
    engine.eval()
    error = gradient_error(engine, batch, expected)
    if not error <= ALLOWED_ERROR:
        raise WrongGradients(
            f"DeepSpeed's gradients of {case.model} are off by {error:.1e}, above {ALLOWED_ERROR:.1e}."
        )
    times = time_parts(device, engine, batch, engine.backward, engine.step)
    yield about | {"variant": "ZeRO-2"} | times | {"gradient_error": error}
    engine.destroy()


def with_zero_2(model: nn.Module, batch_size: int):
    """A model in DeepSpeed's engine."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()},
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def gradient_error(engine, batch: Batch, expected: list[Tensor]) -> float:
    """The error of the engine's gradients, relative to the norm of `expected`; ends the batch with a step."""
    from deepspeed.utils import safe_get_full_grad

    engine.backward(loss_of(engine, batch))
    distance = norm = 0.0
    for parameter, other in zip(engine.module.parameters(), expected, strict=True):
        distance += float((safe_get_full_grad(parameter).cpu() - other.float()).square().sum())
        norm += float(other.float().square().sum())
    engine.step()
    return (distance / norm) ** 0.5


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss


def time_parts(
    device: torch.device,
    model: nn.Module,
    batch: Batch,
    backward: Callable[[Tensor], object],
    step: Callable[[], object],
    zero: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Milliseconds of forward, backward and the whole step with the update, in training mode; the peak in GiB."""
    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(2 + SAMPLES):
        synchronize(device)
        timestamps = [time.perf_counter()]
        loss = loss_of(model, batch)
        synchronize(device)
        timestamps.append(time.perf_counter())
        backward(loss)
        synchronize(device)
        timestamps.append(time.perf_counter())
        step()
        zero()
        synchronize(device)
        timestamps.append(time.perf_counter())
        begin, forward_done, backward_done, done = timestamps
        times = (forward_done - begin, backward_done - forward_done, done - begin)
        for part, seconds in zip(PARTS, times, strict=True):
            samples[part].append(1e3 * seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {f"{part}_ms": statistics.median(found[2:]) for part, found in samples.items()} | {"peak_gib": peak}


def show(row: dict) -> None:
    about = f"{row['model']}, {row['texts']}, {row['batch_size']} x {row['context_length']}"
    times = f"{row['forward_ms']:>10.1f}{row['backward_ms']:>10.1f}{row['step_ms']:>12.1f}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    error = f"   gradients differ by {row['gradient_error']:.1e}" if "gradient_error" in row else ""
    print(f"{about:44}{row['variant']:12}{times}{peak:>8}{error}", flush=True)


if __name__ == "__main__":
    main()
