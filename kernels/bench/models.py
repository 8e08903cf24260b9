"""Whole models on a GPU, dense against the drop-in, in bf16: a training step's times, GPU time and peak memory.

    python kernels/bench/models.py [--record [FILE]]
    python kernels/bench/models.py --tiny                small shapes on the CPU, to try the benchmark itself

BERT-base with a classification head, padded to 512; the Llama-3.2-3B shape, one text padded to 4096 on the right, where
no mask is needed and neither arm gets one. All weights are trained; they are random, and the texts' lengths are drawn
from lengths.json. First, without dropout, each arm's gradients are held against those of an fp32 copy that sees no
padding beyond the longest text. Then both arms run in turns, BERT with its dropout of 0.1.
"""

import argparse
import copy
import functools
import gc
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
)

import evidence
from graph_time import backward_of, milliseconds_in_kernels, waits
from sebp_edge.insight.bench.gate import loss_and_gradients
from sebp_edge.insight.bench.timer import Times, time_in_turns
from sebp_edge.insight.bench.ways import DENSE, DROP_IN, Way
from sebp_edge.models.catalog import bundled_config, resolve
from sebp_edge.ops.timing import milliseconds
from sebp_edge.sparse.rows import IGNORE
from sebp_edge.texts.batches import Batch

LENGTHS = Path(__file__).with_name("lengths.json")
ARMS = (DENSE, DROP_IN)
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


class WrongGradients(Exception):
    """An arm does not compute what the dense model computes."""


@dataclass(frozen=True)
class Case:
    """One model on one batch.

    Attributes:
        target: the least ratio of the dense backward pass's GPU time to the drop-in's that is hoped for.
    """

    model: str
    config: PretrainedConfig
    texts: str
    batch_size: int
    context_length: int
    target: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("tiny shapes are no evidence; record without --tiny.")
    device = torch.device("cpu" if options.tiny else "cuda")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, bf16; ms")
    print(f"{'':34}{'forward':>9}{'backward':>10}{'step':>9}{'backward, GPU':>15}{'peak GiB':>10}{'error':>9}")
    rows = []
    for case in tiny_cases() if options.tiny else cases():
        found = list(measure(case, device))
        show(case, found)
        rows += found
    if options.record:
        sources = ("graph_time.py", "lengths.json", "models.py")
        sources = [*evidence.STEP, "sebp_edge/insight/bench", *(f"kernels/bench/{name}" for name in sources)]
        evidence.record("models", sources, rows, options.record)


def cases() -> Iterator[Case]:
    for texts in ("SST-2", "RTE"):
        for batch_size in (32, 64):
            yield Case("BERT-base", BertConfig(), texts, batch_size, 512, target=1.5)
    yield Case("Llama-3.2-3B", llama_3b(), "WikiText-2", 1, 4096, target=1.7)


def llama_3b() -> LlamaConfig:
    return AutoConfig.from_pretrained(bundled_config(resolve("llama-3.2-3b")))


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny BERT", BertConfig(vocab_size=320, **TINY), "SST-2", 5, 128, target=1.0)
    yield Case("tiny Llama", LlamaConfig(vocab_size=320, **TINY), "WikiText-2", 1, 600, target=1.0)


def measure(case: Case, device: torch.device) -> Iterator[dict]:
    """One row of figures for each arm; times in milliseconds, on a CPU without those of a GPU."""
    torch.manual_seed(0)
    model, batch, tokens = make_model(case.config, device), *make_batch(case, device)
    errors = gradient_errors(model, batch)
    timings = time_in_turns(model.train(), batch, ARMS)
    on_gpu, method = backward_on_gpu(model, batch) if device.type == "cuda" else ({}, None)
    about = {key: value for key, value in asdict(case).items() if key != "config"}
    for name, times in timings.items():
        yield about | {
            "tokens": tokens,
            "way": name,
            **figures(times),
            "gradient_error": errors[name],
            "gpu_backward_ms": on_gpu.get(name),
            "gpu_backward_by": method,
        }


def figures(times: Times) -> dict:
    parts = {f"{part}_ms": 1e3 * getattr(times, part) for part in ("forward", "backward", "step")}
    return parts | {"peak_gib": (times.peak_bytes or 0) / 2**30}


def show(case: Case, rows: list[dict]) -> None:
    print(
        f"{case.model}, {case.texts}, {case.batch_size} x {case.context_length}, "
        f"{rows[0]['tokens'] / case.batch_size / case.context_length:.1%} of it text"
    )
    for row in rows:
        times = "".join(
            f"{row[f'{part}_ms']:>{size}.1f}" for part, size in (("forward", 9), ("backward", 10), ("step", 9))
        )
        on_gpu = "-" if row["gpu_backward_ms"] is None else f"{row['gpu_backward_ms']:.2f}"
        print(f"    {row['way']:30}{times}{on_gpu:>15}{row['peak_gib']:>10.2f}{row['gradient_error']:>9.1e}")
    dense, ours = rows
    said = [
        f"backward {dense['backward_ms'] / ours['backward_ms']:.2f}x",
        f"step {dense['step_ms'] / ours['step_ms']:.2f}x",
    ]
    if ours["gpu_backward_ms"] is not None:
        ratio, saved = dense["gpu_backward_ms"] / ours["gpu_backward_ms"], 1 - ours["peak_gib"] / dense["peak_gib"]
        verdict = "reached" if ratio >= case.target else "missed"
        said.append(
            f"GPU backward ({ours['gpu_backward_by']}) {ratio:.2f}x: {case.target}x {verdict}; memory {-saved:+.0%}"
        )
    print(f"    dense / drop-in: {', '.join(said)}", flush=True)


def make_model(config: PretrainedConfig, device: torch.device) -> nn.Module:
    auto = AutoModelForCausalLM if isinstance(config, LlamaConfig) else AutoModelForSequenceClassification
    with device:
        return auto.from_config(copy.deepcopy(config), dtype=torch.bfloat16)


def make_batch(case: Case, device: torch.device) -> tuple[Batch, int]:
    """Random tokens in texts of lengths as the data set has them, padded on the right; and how many tokens they are."""
    counts = json.loads(LENGTHS.read_text())[case.texts]["counts"]
    lengths_B = torch.tensor(random.Random(0).choices(range(len(counts)), weights=counts, k=case.batch_size))
    mask_BT = torch.arange(case.context_length) < lengths_B[:, None]
    input_ids_BT = torch.randint(10, case.config.vocab_size, mask_BT.shape) * mask_BT
    if isinstance(case.config, LlamaConfig):
        mask, labels = None, input_ids_BT.masked_fill(~mask_BT, IGNORE)
    else:
        mask, labels = mask_BT.long().to(device), torch.randint(0, case.config.num_labels, (case.batch_size,))
    return Batch(input_ids_BT.to(device), mask, labels.to(device), plan=None), int(lengths_B.sum())


def without_padding(batch: Batch) -> Batch:
    """The same texts, padded to the longest of them only; id 0 is padding, and there alone."""
    longest = int(batch.input_ids.ne(0).sum(dim=1).max())
    mask = None if batch.attention_mask is None else batch.attention_mask[:, :longest]
    labels = batch.labels if batch.labels.dim() == 1 else batch.labels[:, :longest]
    return Batch(batch.input_ids[:, :longest], mask, labels, plan=None)


def gradients(model: nn.Module, arm: Way, batch: Batch) -> list[Tensor]:
    """All of them, in the order of the model's parameters."""
    return loss_and_gradients(model, batch, arm, take=Tensor.clone)[1]


def gradient_errors(
    model: nn.Module, batch: Batch, arms: tuple[Way, ...] = ARMS, of_own: float = 0.0
) -> dict[str, float]:
    """The error of each arm's gradients against fp32 ones, over the norm of these, by the arms' names.

    Args:
        of_own: what a parameter's gradient may err besides, over its own norm.

    Raises:
        WrongGradients: a parameter's gradient errs by more than twice the dense arm's and 1e-4 of the norm of all.
    """
    model.eval()
    exact = gradients(copy.deepcopy(model).float(), DENSE, without_padding(batch))
    norms = torch.stack([gradient.norm() for gradient in exact])
    norm = norms.norm()
    errors = {arm.name: distances(gradients(model, arm, batch), exact) / norm for arm in arms}
    for name, found in errors.items():
        excess = found - (2 * errors[DENSE.name] + of_own * norms / norm + 1e-4)
        if not bool((excess <= 0).all()):
            parameter = list(dict(model.named_parameters()))[int(excess.nan_to_num(torch.inf).argmax())]
            raise WrongGradients(
                f"{name}: the gradient of {parameter} is off by more than twice the dense one in bf16."
            )
    return {name: float(found.norm()) for name, found in errors.items()}


def distances(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    """The norm of the difference, parameter by parameter."""
    return torch.stack([(one.float() - other).norm() for one, other in zip(found, exact, strict=True)])


def backward_on_gpu(model: nn.Module, batch: Batch) -> tuple[dict[str, float], str]:
    """Each arm's backward pass in milliseconds, by the arms' names, and how they were taken: the same way for all.

    From captured graphs, unless an arm's backward pass waits for the GPU and cannot be captured.
    """
    if any(with_backward(waits, model, arm, batch) for arm in ARMS):
        time, method = milliseconds_in_kernels, "profiler"
    else:
        time, method = functools.partial(milliseconds, calls=1, repeats=20), "graph"
    return {arm.name: with_backward(time, model, arm, batch) for arm in ARMS}, method


def with_backward(measure: Callable, model: nn.Module, arm: Way, batch: Batch):
    """What `measure` finds of an arm's backward pass."""
    # A graph that is still there would keep its gradients on the stream that it was made on.
    gc.collect()
    torch.cuda.empty_cache()
    with arm.attach(model) as handle:
        return measure(backward_of(lambda: arm.loss(handle, batch), list(model.parameters())))


if __name__ == "__main__":
    main()
