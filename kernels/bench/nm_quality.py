"""Measures what N:M training costs in quality, by method and pattern, and how noisy its gradients are; three seeds.

    python kernels/bench/nm_quality.py digits FILE                              [--record [FILE]]
    python kernels/bench/nm_quality.py tiny FOLDER                              [--record [FILE]]
    python kernels/bench/nm_quality.py sst2 FOLDER --model ENCODER              [--record [FILE]]
    python kernels/bench/nm_quality.py notes FOLDER... --model DECODER          [--record [FILE]]

`nm_settings.py` says what is trained on what. All weights are trained with AdamW, a warm-up over a tenth of the steps
and a linear decay to zero: in bf16 autocast on a GPU, in fp32 on a CPU. The seed sets the initial weights and the
batches, so that runs with one seed differ only in method and pattern. Nothing is tuned for a method. Phases, as shares
of the steps: SR-STE is sparse from the first step; the others are dense for a tenth, decay for a half, and are sparse
for the rest.

Recorded for each run:

    loss, accuracy      of the pruned model on held-out data: per token, or per text or image
    training, inference the FLOPs of all products of linear layers, beside those of the dense run. Of the pruned layers'
                        products, the forward pass and dX count n/m in the sparse phase; they count fully in the dense
                        phase and in the decay, whatever the method, and dW counts fully always. Inference is a forward
                        pass of the pruned model.
    sparse_share        the share of the steps in the sparse phase
    shrinkage           the share of a pruned weight that SR-STE's term takes in all: the sum over steps of λ times the
                        learning rate
    train_0 to 9        the mean training loss in each tenth of the steps
    variance_0 to 9     at the middle of each tenth, the variance of a batch's gradient over batches, with the model's
                        weights fixed: mean over the weights of the prunable layers
    squared_0 to 9      there, the mean square of the mean gradient, by which the variance can be divided
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evidence
from nm_settings import COUPLED, SETTINGS, Batch, Setting
from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import pick_device
from sebp_edge.ops import prune_
from sebp_edge.pruning.phases import SHRINKAGE, Phases
from sebp_edge.research import nm_sparse
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.sparsity import Pattern, Sparsity

DENSE = "dense"
# Shares of the steps; SR-STE has no such phases.
DENSE_PHASE, DECAY_PHASE = 0.1, 0.5
WEIGHT_DECAY, WARMUP = 0.01, 0.1
PARTS, NOISE_BATCHES = 10, 4
# Seeds of the batches of which the variance is taken; the same ones in all runs.
NOISE_SEED = 1_000_003
SOURCES = (*evidence.OPS, "sebp_edge/pruning", "sebp_edge/sparsity.py", "kernels/bench/nm_settings.py", __file__)


class Run(NamedTuple):
    """One training; the pattern is "" if it is dense."""

    method: str
    pattern: str
    seed: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--model", help="a folder, or a name that sebp-edge knows")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--patterns", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, on one device")
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.setting in ("sst2", "notes") and not options.model:
        parser.error(f"{options.setting} needs a --model.")
    setting = SETTINGS[options.setting](options.data, options.model)
    runs = all_runs(setting, options.methods, options.patterns, options.seeds)
    records = measured(setting, runs, options.device, options.processes)
    show(records)
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        evidence.record(f"nm-quality-{setting.name}", SOURCES, records, options.record, on_cpu)


def all_runs(
    setting: Setting, methods: Iterable[str] | None, patterns: Iterable[str] | None, seeds: Iterable[int]
) -> list[Run]:
    """The dense run and those of every method and pattern, for each seed."""
    pruned = [(method, pattern) for method in methods or setting.methods for pattern in patterns or setting.patterns]
    return [Run(*one, seed) for seed in seeds for one in ((DENSE, ""), *pruned)]


def measured(setting: Setting, runs: list[Run], device: str | None, processes: int) -> list[dict]:
    """Trains, several at a time if asked for; returns one row per run whose pattern divides the layers."""
    if processes == 1:
        return [row for row in train_all(setting, runs, device) if row]
    # Read by the math libraries of the processes when they start.
    os.environ["OMP_NUM_THREADS"] = "1"
    shares = [runs[rank::processes] for rank in range(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        done = pool.map(train_all, *zip(*((setting, share, device) for share in shares), strict=True))
        rows = [row for share in done for row in share if row]
    order = {run: number for number, run in enumerate(runs)}
    return sorted(rows, key=lambda row: order[Run(row["method"], row["pattern"], row["seed"])])


def train_all(setting: Setting, runs: list[Run], device: str | None) -> list[dict | None]:
    rows = []
    for run in runs:
        row = train(setting, run, pick_device(device))
        said = f"{row['loss']:.4f}" if row else "the pattern does not divide the layers"
        print(f"{setting.name}, {run.method} {run.pattern}, seed {run.seed}: {said}", flush=True)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------- training


def train(setting: Setting, run: Run, device: torch.device) -> dict | None:
    """Runs one training; returns its row, or None if the pattern does not divide a layer."""
    torch.manual_seed(run.seed)
    model = setting.new_model().to(device).train()
    layers = prunable(model, setting.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, setting.num_steps))
    if run.method == COUPLED:
        couple(optimizer, layers, Pattern.parse(run.pattern))
    try:
        pruning = pruned(model, setting, run)
    except SparsityError as error:
        if "do not divide" in str(error):
            return None
        raise
    losses, noise, moments = [], [], middles(setting.num_steps)
    with pruning as sparse:
        for step, batch in enumerate(setting.batches(setting.num_steps, run.seed)):
            if step in moments:
                noise.append(gradient_noise(model, layers, setting.batches(NOISE_BATCHES, NOISE_SEED)))
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if sparse is not None:
                sparse.step()
            schedule.step()
            losses.append(loss.detach())
    found = torch.stack(losses).tolist()
    ends = [round(part * len(found) / PARTS) for part in range(PARTS + 1)]
    parts = (found[begin:end] for begin, end in pairwise(ends))
    held_out_loss, accuracy = evaluate(model, setting.heldout)
    return {
        "setting": setting.name,
        **run._asdict(),
        "steps": setting.num_steps,
        "learning_rate": setting.learning_rate,
        "loss": held_out_loss,
        "accuracy": accuracy,
        **flops(model, layers, next(setting.batches(1, NOISE_SEED)), run, setting.num_steps),
        "shrinkage": shrinkage(run, setting) if run.pattern else 0.0,
        **{f"train_{part}": mean(each) if each else None for part, each in enumerate(parts)},
        **{f"variance_{part}": variance for part, (variance, _) in enumerate(noise)},
        **{f"squared_{part}": squared for part, (_, squared) in enumerate(noise)},
    }


def pruned(model: nn.Module, setting: Setting, run: Run) -> AbstractContextManager:
    if not run.pattern:
        return nullcontext()
    sparsity = sparsity_of(run)
    return nm_sparse(
        model,
        run.pattern,
        sparsity.method,
        num_steps=setting.num_steps,
        dense=sparsity.dense,
        decay=sparsity.decay,
        layers=setting.layers,
    )


def sparsity_of(run: Run) -> Sparsity:
    if run.method in ("sr-ste", COUPLED):
        return Sparsity(pattern=run.pattern, method="sr-ste", dense=0.0, decay=0.0)
    return Sparsity(pattern=run.pattern, method=run.method, dense=DENSE_PHASE, decay=DECAY_PHASE)


def couple(optimizer: torch.optim.Optimizer, layers: dict[str, nn.Linear], pattern: Pattern) -> None:
    """Adds λ times each pruned weight to its gradient, so that Adam normalises the term.

    `nm_sparse` shrinks the weight too, but only by λ times the learning rate.
    """

    @torch.no_grad()
    def add_term(*_) -> None:
        # The hook of nm_sparse runs before those of one optimizer, so the parameters hold their dense weights here.
        for layer in layers.values():
            kept = torch.empty_like(layer.weight)
            prune_(kept, layer.weight, pattern.n, pattern.m)
            layer.weight.grad.add_(layer.weight - kept, alpha=SHRINKAGE)

    optimizer.register_step_pre_hook(add_term)


def rate_at(step: int, num_steps: int) -> float:
    """The share of the highest learning rate."""
    return min((step + 1) / (WARMUP * num_steps), (num_steps - step) / ((1 - WARMUP) * num_steps), 1.0)


def prunable(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in names
    }


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    with computing(model) as device:
        return model(**{name: x.to(device, non_blocking=True) for name, x in batch.items()}).loss


@contextmanager
def computing(model: nn.Module) -> Iterator[torch.device]:
    """Context in which the model computes: in bf16 on a GPU."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield device


def middles(num_steps: int) -> list[int]:
    """The steps in the middle of each tenth."""
    return [(2 * part + 1) * num_steps // (2 * PARTS) for part in range(PARTS)]


def gradient_noise(model: nn.Module, layers: dict[str, nn.Linear], batches: Iterable[Batch]) -> tuple[float, float]:
    """The variance of a batch's gradient over these batches, and the mean gradient's square: means over the weights."""
    sums, squares, number = None, 0.0, 0
    for batch in batches:
        loss_of(model, batch).backward()
        gradients = [layer.weight.grad.float() for layer in layers.values()]
        squares = squares + sum(each.square().sum() for each in gradients)
        sums = [one + each for one, each in zip(sums, gradients, strict=True)] if sums else gradients
        number += 1
        model.zero_grad()
    squared_mean = sum((each / number).square().sum() for each in sums)
    size = sum(each.numel() for each in sums)
    variance = (squares - number * squared_mean) / (number - 1)
    return float(variance / size), float(squared_mean / size)


# ------------------------------------------------------------------------------------------------------------- measures


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> tuple[float, float | None]:
    """The mean loss per token, or per text or image, for which the accuracy is given too."""
    model.eval()
    losses, right = [], []
    for batch in batches:
        with computing(model) as device:
            inputs = {name: x.to(device) for name, x in batch.items() if name != "labels"}
            logits = model(**inputs).logits.float()
        labels = batch["labels"].to(device)
        if labels.dim() == 2:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        else:
            right.append(logits.argmax(dim=-1) == labels)
        losses.append(F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)[labels != IGNORE])
    return float(torch.cat(losses).mean()), float(torch.cat(right).float().mean()) if right else None


@torch.no_grad()
def flops(model: nn.Module, layers: dict[str, nn.Linear], batch: Batch, run: Run, num_steps: int) -> dict[str, float]:
    """The FLOPs of a training and of inference, as shares of those of the dense run; the share of sparse steps."""
    multiplications: dict[str, int] = {}

    def count(name: str, x: Tensor, layer: nn.Linear) -> None:
        multiplications[name] = x.numel() // x.shape[-1] * layer.weight.numel()

    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: count(name, args[0], layer))
        for name, layer in linear
    ]
    loss_of(model, batch)
    for hook in hooks:
        hook.remove()
    if not run.pattern:
        return {"training": 1.0, "inference": 1.0, "sparse_share": 0.0}
    pattern = Pattern.parse(run.pattern)
    saved = sum(multiplications[name] for name in layers) / sum(multiplications.values()) * (1 - pattern.n / pattern.m)
    sparse_share = 1 - Phases(sparsity_of(run), num_steps).first_sparse_step / num_steps
    # Of the three products, the forward pass and dX.
    return {"training": 1 - saved * sparse_share * 2 / 3, "inference": 1 - saved, "sparse_share": sparse_share}


def shrinkage(run: Run, setting: Setting) -> float:
    """The sum of the shares by which SR-STE shrinks a pruned weight that stays pruned."""
    rates = sum(rate_at(step, setting.num_steps) for step in range(setting.num_steps)) * setting.learning_rate
    return Phases(sparsity_of(run), setting.num_steps).shrinkage * rates


def show(records: list[dict]) -> None:
    """Prints the mean and the standard deviation of the loss, and the variance of gradients beside the dense run's."""
    dense = {row["seed"]: row for row in records if row["method"] == DENSE}
    cells: dict[tuple[str, str], list[dict]] = {}
    for row in records:
        cells.setdefault((row["method"], row["pattern"]), []).append(row)
    print(f"{'':26}{'loss':>18}{'accuracy':>10}{'training':>10}{'inference':>11}   variance / dense's, by tenths")
    for (method, pattern), rows in cells.items():
        losses = [row["loss"] for row in rows]
        spread = stdev(losses) if len(losses) > 1 else 0.0
        right = f"{mean(row['accuracy'] for row in rows):.1%}" if rows[0]["accuracy"] is not None else ""
        ratios = [
            mean(row[f"variance_{part}"] / dense[row["seed"]][f"variance_{part}"] for row in rows)
            for part in range(PARTS)
        ]
        print(
            f"{f'{method} {pattern}':26}{f'{mean(losses):.4f} ± {spread:.4f}':>18}{right:>10}"
            f"{rows[0]['training']:>10.0%}{rows[0]['inference']:>11.0%}   {' '.join(f'{each:.2f}' for each in ratios)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
