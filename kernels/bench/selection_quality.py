"""Measures what selecting rows of dL/dY costs in quality: the same training in each variant, over seeds.

    python kernels/bench/selection_quality.py --decoder tiny --notes FOLDER... [--record [FILE]]
    python kernels/bench/selection_quality.py --encoder FOLDER --glue FOLDER [--tasks rte cola] [--record [FILE]]

A decoder learns paragraphs of notes, padded to `CONTEXT`; an encoder with a new head learns tasks of `glue_texts`. All
weights are trained, in fp32, with AdamW and a constant learning rate. The seed sets the texts, their order, the head
and the dropout, so that each variant is compared with "dense" on the same training.

    dense               autograd's own backward pass
    exact               sparsify(model)
    top n               sparsify(model, rows=TopN(n)), with n a fifth of the padded rows, close to the paper's N
    threshold           sparsify(model, rows=Threshold()), with thresholds found in each layer's first passes
    energy              sparsify(model, rows=Energy()), with a number of rows that adapts to each layer
    published           the backward pass of the code published with the paper: every linear layer but the head computes
                        dL/dX for the first n rows, whatever they hold, and never a weight's gradient

All of it runs on the CPU, or with --device cuda on a GPU. Fails if "exact" is further from "dense" than the seeds are
from each other.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import evidence
from glue_texts import TASKS, Labelled, read_task
from sebp_edge import sparsify
from sebp_edge.models.catalog import resolve
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.rows.selection import DroppedRows, Energy, Threshold, TopN
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import encode
from sebp_edge.texts.readers import read_texts

# The encoders' learning rate is the paper's.
DECODER_RATE, ENCODER_RATE = 5e-4, 1.23e-4
CONTEXT = {"notes": 128, "rte": 96, "mrpc": 80, "cola": 64, "sst2": 64}
STEPS = {"notes": 40, "rte": 30, "mrpc": 30, "cola": 50, "sst2": 50}
BATCH_SIZE, HELD_OUT, PARTS = 8, 160, 10
# Numbers of notes to evaluate on and to train on.
HELD_OUT_NOTES, NOTES = 100, 600
HEADS = ("lm_head", "classifier")
DENSE, EXACT = "dense", "exact"
SOURCES = (
    *evidence.OPS,
    *(f"sebp_edge/{folder}" for folder in ("patches", "rows", "sparse", "texts")),
    "kernels/bench/glue_texts.py",
    __file__,
)


@dataclass(frozen=True)
class Setting:
    """One model and what it learns.

    Attributes:
        weights: which weights are pretrained, in words.
        make_model: makes a new copy of the model.
        batches: the batches of one training by its seed, as keyword arguments of the model's call.
        heldout: the batches that it is evaluated on.
        rows: padded rows of a batch.
    """

    model: str
    texts: str
    weights: str
    make_model: Callable[[], nn.Module]
    batches: Callable[[int], list[dict[str, Tensor]]]
    heldout: list[dict[str, Tensor]]
    rows: int
    learning_rate: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--decoder", help="a name that sebp-edge knows, or a folder")
    model.add_argument("--encoder", type=Path)
    parser.add_argument("--notes", type=Path, nargs="+", default=[])
    parser.add_argument("--glue", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if (options.decoder and not options.notes) or (options.encoder and not options.glue):
        parser.error("a decoder needs --notes, an encoder --glue.")
    records, failed = [], []
    for setting in settings(options):
        found = compare(setting, options.seeds, torch.device(options.device))
        records += found
        if not show(found):
            failed.append(setting.texts)
    if options.record:
        evidence.record(
            f"selection-quality-{records[0]['model']}", SOURCES, records, options.record, options.device == "cpu"
        )
    if failed:
        sys.exit(f"exact is further from dense than the seeds are from each other: {', '.join(failed)}.")


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    if options.decoder:
        yield decoder_setting(options.decoder, options.notes, options.steps or STEPS["notes"])
    else:
        for task in options.tasks:
            yield encoder_setting(options.encoder, options.glue, task, options.steps or STEPS[task])


def decoder_setting(name: str, folders: list[Path], steps: int) -> Setting:
    reference, context = resolve(name), CONTEXT["notes"]
    tokenizer = AutoTokenizer.from_pretrained(reference.location)
    documents = read_texts(folders).documents
    random.Random(0).shuffle(documents)
    # Whole notes are held out, so that no paragraph is evaluated after training on others of the same note.
    parts = documents[:HELD_OUT_NOTES], documents[HELD_OUT_NOTES:][:NOTES]
    heldout, pool = (_paragraphs(part, tokenizer, context) for part in parts)
    collate = Collator(context, pad_token_id=tokenizer.pad_token_id or 0)

    def batches(examples: list) -> list[dict[str, Tensor]]:
        return [_keywords(collate(group)) for group in _groups(examples)]

    return Setting(
        model=reference.name,
        texts="notes",
        weights="pretrained",
        make_model=lambda: AutoModelForCausalLM.from_pretrained(reference.location, dtype=torch.float32),
        batches=lambda seed: batches(_drawn(pool, steps, seed)),
        heldout=batches(heldout[:HELD_OUT]),
        rows=BATCH_SIZE * context,
        learning_rate=DECODER_RATE,
    )


def _paragraphs(documents: list[Document], tokenizer, context: int) -> list:
    texts = [(each.source, text) for each in documents for text in each.content.split("\n\n") if text.strip()]
    return encode([Document(*each) for each in texts], tokenizer, context)[0]


def _keywords(batch) -> dict[str, Tensor]:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def encoder_setting(folder: Path, glue: Path, name: str, steps: int) -> Setting:
    tokenizer, task = AutoTokenizer.from_pretrained(folder), read_task(glue, name)

    def batches(examples: list[Labelled]) -> list[dict[str, Tensor]]:
        return [_encoded(group, tokenizer, CONTEXT[name]) for group in _groups(examples)]

    return Setting(
        model=folder.name,
        texts=name,
        weights="pretrained, head random",
        make_model=lambda: AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32),
        batches=lambda seed: batches(_drawn(task.train, steps, seed)),
        heldout=batches(random.Random(0).sample(task.heldout, min(HELD_OUT, len(task.heldout)))),
        rows=BATCH_SIZE * CONTEXT[name],
        learning_rate=ENCODER_RATE,
    )


def _encoded(group: list[Labelled], tokenizer, context: int) -> dict[str, Tensor]:
    texts = map(list, zip(*(each.texts for each in group), strict=True))
    padded = tokenizer(*texts, padding="max_length", truncation=True, max_length=context, return_tensors="pt")
    return dict(padded) | {"labels": torch.tensor([each.label for each in group])}


def _drawn(pool: list, steps: int, seed: int) -> list:
    if len(pool) < steps * BATCH_SIZE:
        sys.exit(f"{steps} steps need {steps * BATCH_SIZE} texts, and there are {len(pool)}; give more, or --steps.")
    return random.Random(seed).sample(pool, steps * BATCH_SIZE)


def _groups(examples: list) -> Iterator[list]:
    """The examples of each batch; the last batch may be smaller."""
    return (examples[begin : begin + BATCH_SIZE] for begin in range(0, len(examples), BATCH_SIZE))


# ------------------------------------------------------------------------------------------------------------ variants


def variants(rows: int) -> dict[str, Callable[[nn.Module], AbstractContextManager]]:
    """The variants of the backward pass, for batches with this many padded rows."""
    n = max(1, rows // 5)
    return {
        DENSE: lambda model: nullcontext(),
        EXACT: sparsify,
        "top n": lambda model: sparsify(model, rows=TopN(n)),
        "threshold": lambda model: sparsify(model, rows=Threshold()),
        "energy": lambda model: sparsify(model, rows=Energy()),
        "published": lambda model: published(model, n),
    }


@contextmanager
def published(model: nn.Module, num_rows: int) -> Iterator[None]:
    """Gives every linear layer but the head the published backward pass."""
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] not in HEADS
    ]
    for layer in layers:
        layer.forward = lambda x, layer=layer: _FirstRows.apply(x, layer.weight, layer.bias, num_rows)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _FirstRows(torch.autograd.Function):
    """A linear layer with dX for the first rows of the flattened batch only, zero elsewhere, and no dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_MK: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
        ctx.save_for_backward(weight_MK)
        ctx.num_rows, ctx.has_bias = num_rows, bias is not None
        return F.linear(x, weight_MK, bias)

    @staticmethod
    def backward(ctx, dout: Tensor):
        (weight_MK,) = ctx.saved_tensors
        dout_NM = dout.flatten(0, -2)
        dx_NK = dout_NM.new_zeros(len(dout_NM), weight_MK.shape[1])
        dx_NK[: ctx.num_rows] = dout_NM[: ctx.num_rows] @ weight_MK
        return dx_NK.view(*dout.shape[:-1], -1), None, dout_NM.sum(0) if ctx.has_bias else None, None


# ------------------------------------------------------------------------------------------------------------ measuring


def compare(setting: Setting, seeds: list[int], device: torch.device) -> list[dict]:
    """Trains in every variant with every seed; returns one row of results per training."""
    records = []
    for seed in seeds:
        batches = setting.batches(seed)
        active = mean(int(batch["attention_mask"].sum()) for batch in batches)
        before, _ = evaluate(new_model(setting, seed).to(device), setting.heldout)
        for name, variant in variants(setting.rows).items():
            about = {"model": setting.model, "texts": setting.texts, "weights": setting.weights, "variant": name}
            about |= {"seed": seed, "steps": len(batches), "rows": setting.rows, "active": active}
            records.append(about | {"heldout_before": before} | train(setting, batches, variant, seed, device))
            print(
                f"{setting.model}, {setting.texts}, {name}, seed {seed}: {records[-1]['heldout_loss']:.4f}", flush=True
            )
    return records


def train(
    setting: Setting, batches: list[dict[str, Tensor]], variant: Callable, seed: int, device: torch.device
) -> dict:
    """Runs one training; returns the held-out loss after it, and the mean training loss in each of its ten parts."""
    model, losses = new_model(setting, seed).to(device), []
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=setting.learning_rate, weight_decay=0.0)
    with variant(model) as handle:
        for batch in batches:
            loss = model(**_on(device, batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        dropped = handle.dropped() if handle is not None else []
    after, accuracy = evaluate(model, setting.heldout)
    ends = [round(part * len(losses) / PARTS) for part in range(PARTS + 1)]
    parts = [losses[begin:end] for begin, end in pairwise(ends)]
    curve = {f"train_{number}": mean(part) if part else None for number, part in enumerate(parts)}
    return {"heldout_loss": after, "accuracy": accuracy, **_kept(dropped), **curve}


def _on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.to(device) for name, values in batch.items()}


def new_model(setting: Setting, seed: int) -> nn.Module:
    """A new model; the seed fixes its random head and torch's random state after it."""
    torch.manual_seed(seed)
    return setting.make_model()


def _kept(dropped: list[DroppedRows]) -> dict[str, float | None]:
    """The share of active rows that was computed, over all layers, and the mean share of squared norm that was not."""
    if not dropped:
        return {"kept": None, "lost_energy": None}
    return {
        "kept": sum(each.kept for each in dropped) / sum(each.active for each in dropped),
        "lost_energy": mean(each.lost_energy for each in dropped),
    }


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[float, float | None]:
    """The mean loss per token, or per text, for which the accuracy is given too."""
    model.eval()
    losses, right = [], []
    for batch in (_on(model.device, batch) for batch in batches):
        longest = int(batch["attention_mask"].sum(dim=1).max())
        inputs = {name: x[:, :longest] for name, x in batch.items() if name != "labels"}
        logits, labels = model(**inputs).logits, batch["labels"]
        if labels.dim() == 2:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:longest].flatten()
        else:
            right.append(logits.argmax(dim=-1) == labels)
        losses.append(F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)[labels != IGNORE])
    return float(torch.cat(losses).mean()), float(torch.cat(right).float().mean()) if right else None


def show(records: list[dict]) -> bool:
    """Prints means over seeds, with differences at the same seed.

    Returns whether the held-out loss of "exact" is within the seeds' standard deviation of that of "dense".
    """
    by_variant: dict[str, list[dict]] = {}
    for each in records:
        by_variant.setdefault(each["variant"], []).append(each)
    dense, first = by_variant[DENSE], records[0]
    gain = mean(each["heldout_before"] - each["heldout_loss"] for each in dense)
    print(f"\n{first['model']} ({first['weights']}), {first['texts']}; {len(dense)} seeds; ± standard error")
    print(f"{'':16}{'held-out loss':>20}{'more than dense':>22}{'of its gain':>13}{'accuracy':>18}{'rows kept':>11}")
    for name, found in by_variant.items():
        losses = _with_error([each["heldout_loss"] for each in found])
        more = [each["heldout_loss"] - base["heldout_loss"] for each, base in zip(found, dense, strict=True)]
        share = f"{mean(more) / gain:.1%}" if gain > 0 else "-"
        right = [each["accuracy"] for each in found if each["accuracy"] is not None]
        kept = [each["kept"] for each in found if each["kept"] is not None]
        print(
            f"{name:16}{losses:>20}{_with_error(more):>22}{share:>13}"
            f"{_with_error(right) if right else '':>18}{f'{mean(kept):.0%}' if kept else '':>11}"
        )
    spread = stdev(each["heldout_loss"] for each in dense) if len(dense) > 1 else math.inf
    max_difference = max(
        abs(each["heldout_loss"] - base["heldout_loss"]) for each, base in zip(by_variant[EXACT], dense, strict=True)
    )
    print(
        f"exact is at most {max_difference:.1e} from dense; the seeds' standard deviation is {spread:.1e}", flush=True
    )
    return max_difference <= spread


def _with_error(values: list[float]) -> str:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean(values):.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
