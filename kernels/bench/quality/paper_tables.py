"""Trains real models with dense gradients and with SEBP, and asks them questions (Table 9, Figures 5 and 7).

    python kernels/bench/quality/paper_tables.py DATA --decoder MODEL --encoder FOLDER --rows FILE [--tasks arc-c ...]
        [--seeds 0 1 2] [--steps 60] [--asked 1000] [--processes 8] [--minutes 5] [--device cuda] [--record [FILE]]

DATA has the publishers' files. All weights are trained, in fp32, with AdamW and a constant rate, on batches of 8 padded
texts: a decoder on questions with their right endings and a loss on every token, an encoder with a new head on classes.
All are asked the same other questions, in TF32; a decoder's answer is the ending with the largest log-probability per
byte. The seed sets the texts, their order, the head and the dropout: each variant is compared with "dense" in a seed.
"published" is the code published with the paper: each linear layer but the head computes dX for the first n rows,
whatever they hold, and never dW. n is a fifth of the padded rows, for "top n" too.

Gradients are compared first. Rows that FILE has are not measured again; no training starts after --minutes.
"""

import bz2
import copy
import csv
import json
import lzma
import random
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean, mode
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from sebp_edge import Recipe
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.research import Threshold, TopN, sparsify

SOURCES = (*evidence.OPS, *(f"sebp_edge/{each}" for each in ("models", "research/rules", "sparse")), __file__)
VARIANTS = ("dense", "exact", "top n", "threshold", "published")
# To train on, and to ask; a single file is divided.
FILES = {
    "arc-c": ["lm/arc/arc_challenge.jsonl.xz"],
    "sst2": ["glue/sst2/train.tsv.xz", "glue/sst2/test.tsv"],
    "arc-e": ["lm/arc/arc_easy.jsonl.xz"],
    "mrpc": ["glue/mrpc/msr-para-train.tsv.xz", "glue/mrpc/msr-para-test.tsv.xz"],
    "hellaswag": ["lm/hellaswag/hellaswag_val_full.txt.bz2"],
    "cola": ["glue/cola/in_domain_train.tsv.xz", "glue/cola/in_domain_dev.tsv"],
    "winogrande": ["lm/winogrande/winogrande.jsonl.xz"],
    "rte": ["glue/rte/full_train_part1.json.xz", "glue/rte/full_train_part2.json"],
}
# The columns of the texts, that of the class, and the number of lines above.
COLUMNS = {"sst2": (slice(0, 1), 1, 1), "mrpc": (slice(3, 5), 0, 1), "cola": (slice(3, 4), 1, 0)}
BATCH, PARTS, IGNORE, RESAMPLES = 8, 10, -100, 2000


class Question(NamedTuple):
    """A beginning and an ending for each option, or the texts of a class; and the number of what is right."""

    texts: list
    right: int


class Job(NamedTuple):
    task: str
    seed: int
    variant: str
    options: Namespace

    @property
    def is_choice(self) -> bool:
        return FILES[self.task][0].startswith("lm")

    @property
    def setting(self) -> tuple[Path, int, int, float]:
        """Model, padded length, steps and learning rate; the encoder's rate is the paper's."""
        usual = (self.options.decoder, 256, 60, 5e-5) if self.is_choice else (self.options.encoder, 128, 250, 1.23e-4)
        return *usual[:2], self.options.steps or usual[2], usual[3]


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("data", type=Path)
    for name in ("--decoder", "--encoder", "--rows"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(FILES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name, usual in {"--steps": 0, "--asked": 1000, "--processes": 1, "--minutes": 60}.items():
        parser.add_argument(name, type=int, default=usual)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.end = time.time() + 60 * options.minutes
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    done = {(row["texts"], row["seed"], row["variant"]) for row in rows}
    jobs = [Job(task, seed, name, options) for seed, task, name in product(options.seeds, options.tasks, VARIANTS)]
    one_of_each = list({job.is_choice: job for job in jobs}.values())
    print(*side_by_side.run(compare_gradients, one_of_each, options.processes), sep="\n", flush=True)
    for row in side_by_side.run(measure, [job for job in jobs if job[:3] not in done], options.processes):
        if row is not None:
            rows.append(row)
            with options.rows.open("a") as file:
                print(json.dumps(row), file=file)
            print(*(row[name] for name in ("texts", "seed", "variant", "loss", "accuracy", "seconds")), flush=True)
    rows.sort(key=lambda row: (options.tasks.index(row["texts"]), row["seed"], VARIANTS.index(row["variant"])))
    for task, variant in product(options.tasks, VARIANTS):
        dense = {row["seed"]: row for row in rows if (row["texts"], row["variant"]) == (task, "dense")}
        found = [row for row in rows if (row["texts"], row["variant"]) == (task, variant) and row["seed"] in dense]
        if found:
            print(f"{task}, {variant}: {compared(found, dense, '_before' * (variant == 'dense'))}", flush=True)
    evidence.record("paper-tables", SOURCES, rows, options.record, options.device == "cpu")


def compared(rows: list[dict], others: dict[int, dict], suffix: str) -> str:
    """Mean accuracy and loss, and how much more they are; the 95 % interval resamples seeds and questions."""
    pairs = [(row, others[row["seed"]]) for row in rows]
    more_SQ = torch.stack([bits(row["right"]) - bits(other[f"right{suffix}"]) for row, other in pairs])
    draw = torch.Generator().manual_seed(0)
    seeds_RS, asked_RQ = (torch.randint(size, (RESAMPLES, size), generator=draw) for size in more_SQ.shape)
    means_R = torch.stack([more_SQ[seeds][:, asked].mean() for seeds, asked in zip(seeds_RS, asked_RQ, strict=True)])
    low, high = means_R.quantile(torch.tensor([0.025, 0.975])).tolist()
    accuracy, loss = (mean(row[name] for row in rows) for name in ("accuracy", "loss"))
    more = mean(row["loss"] - other[f"loss{suffix}"] for row, other in pairs)
    return f"accuracy {accuracy:.4f}, {more_SQ.mean():+.4f} ({low:+.4f} to {high:+.4f}); loss {loss:.4f}, {more:+.2g}"


def bits(digits: str) -> Tensor:
    """Which questions are right, of their bits behind a first one as a hexadecimal number."""
    return torch.tensor([float(bit) for bit in f"{int(digits, 16):b}"[1:]])


@cache
def questions(data: Path, task: str, asked: int) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and those to ask. In a divided file, those that begin alike are neighbours."""
    train, *others = (list(read(data / file, task)) for file in FILES[task])
    if others:
        return train, random.Random(0).sample(others[0], min(asked, len(others[0])))
    train.sort(key=lambda each: zlib.crc32(each.texts[0][0][:25].encode()))
    asked = min(asked, len(train) // 2)
    return train[asked:], train[:asked]


def read(path: Path, task: str) -> Iterator[Question]:
    unpack = {".xz": lzma.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    text = unpack(path.read_bytes()).decode("utf-8-sig")
    if task in COLUMNS:
        texts, label, header = COLUMNS[task]
        for line in list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))[header:]:
            yield Question(line[texts], int(line[label]))
    elif task == "rte":
        for each in json.loads(text).values():
            yield Question([each["text_a"], each["text_b"]], int(each["label"] == "entailment"))
    elif task == "hellaswag":
        for begin, right, *endings in zip(*[iter(text.splitlines())] * 6, strict=True):
            yield Question([(begin, f" {ending}") for ending in endings], int(right))
    else:
        for each in map(json.loads, text.splitlines()):
            begins = each.get("context_options") or [f"{each['query']}\nAnswer:"] * len(each["choices"])
            endings = each.get("choices") or [each["continuation"]] * len(begins)
            yield Question([(begin, f" {end}") for begin, end in zip(begins, endings, strict=True)], each["gold"])


def measure(job: Job) -> dict | None:
    """Trains once; returns the row of the result, or None if it is too late."""
    begin = time.time()
    if begin > job.options.end:
        return None
    (model, tokenizer), (path, _, steps, rate) = new_model(job), job.setting
    batches, test, losses = batches_of(job, tokenizer), questions(job.options.data, job.task, job.options.asked)[1], []
    before = ask(model, tokenizer, test, job) if job.variant == "dense" else {}
    rows, kinds = batches[0]["input_ids"].numel(), [each.right for each in test]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.0)
    with backward_pass(job.variant, model, rows // 5) as handle:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        dropped = handle.dropped() if handle else []
    row = {
        "model": path.stem,
        "texts": job.task,
        "variant": job.variant,
        "seed": job.seed,
        "steps": steps,
        "rows": rows,
    }
    row["active"] = mean(int(each["attention_mask"].sum()) for each in batches)
    row["kept"] = sum(each.kept for each in dropped) / sum(each.active for each in dropped) if dropped else None
    row |= {"asked": len(test), "most_frequent": kinds.count(mode(kinds)) / len(kinds)} | ask(
        model, tokenizer, test, job
    )
    row |= {f"{name}_before": value for name, value in before.items()}
    for part in range(PARTS):
        row[f"train_{part}"] = mean(losses[part * steps // PARTS : (part + 1) * steps // PARTS] or losses)
    return row | {"seconds": round(time.time() - begin, 1)}


def compare_gradients(job: Job) -> str:
    """Compares the gradients of a batch with dense ones, in the drop-in's second pass, which reads the labels."""
    (model, tokenizer), found = new_model(job), []
    batch = batches_of(job, tokenizer)[0]
    for variant in ("dense", "exact"):
        with backward_pass(variant, model.eval(), 0):
            for _ in range(2):
                model.zero_grad()
                model(**batch).loss.backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    error = float((found[1] - found[0]).norm() / found[0].norm())
    if not error < 1e-4:
        raise RuntimeError(f"{job.task}: gradients differ by {error:.1e} of their norm.")
    return f"{job.task}: gradients differ by {error:.1e} of their norm"


@cache
def pretrained(name: Path):
    return load_base_model(resolve(name), Recipe.load("notes"), torch.device("cpu"))


def new_model(job: Job) -> tuple:
    """A model and its tokenizer; the seed fixes a new head, and torch's random state after it."""
    torch.manual_seed(job.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if job.is_choice:
        base = pretrained(job.setting[0])
        base.tokenizer.pad_token, base.tokenizer.padding_side = base.tokenizer.eos_token, "right"
        return copy.deepcopy(base.model).to(job.options.device), base.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(job.setting[0], dtype=torch.float32)
    return model.to(job.options.device), AutoTokenizer.from_pretrained(job.setting[0])


def batches_of(job: Job, tokenizer) -> list[dict[str, Tensor]]:
    _, context, steps, _ = job.setting
    train, _ = questions(job.options.data, job.task, job.options.asked)
    drawn = random.Random(job.seed).sample(train, steps * BATCH)
    return [
        encoded(drawn[at : at + BATCH], job, tokenizer, {"padding": "max_length", "max_length": context})
        for at in range(0, len(drawn), BATCH)
    ]


def encoded(some: list[Question], job: Job, tokenizer, padding: dict) -> dict[str, Tensor]:
    rows = [["".join(each.texts[each.right])] if job.is_choice else each.texts for each in some]
    batch = tokenizer(*map(list, zip(*rows, strict=True)), truncation=True, return_tensors="pt", **padding)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
    batch["labels"] = labels if job.is_choice else torch.tensor([each.right for each in some])
    return {name: values.to(job.options.device) for name, values in batch.items()}


def backward_pass(variant: str, model: nn.Module, n: int) -> AbstractContextManager:
    if variant == "published":
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] not in ("lm_head", "classifier"):
                layer.forward = partial(with_first_rows, layer, n)
    rules = {"exact": "exact", "top n": TopN(max(1, n)), "threshold": Threshold()}
    return sparsify(model, rows=rules[variant]) if variant in rules else nullcontext()


def with_first_rows(layer: nn.Linear, n: int, x: Tensor) -> Tensor:
    is_first = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1) < n
    return F.linear(torch.where(is_first, x, x.detach()), layer.weight.detach(), layer.bias)


@torch.no_grad()
def ask(model: nn.Module, tokenizer, test: list[Question], job: Job) -> dict:
    """The mean loss of what is right per token or text, the share of right answers, and which are right: see `bits`."""
    torch.set_float32_matmul_precision("high")
    is_right, losses = (endings if job.is_choice else classes)(model.eval(), tokenizer, test, job)
    torch.set_float32_matmul_precision("highest")
    digits = f"{int('1' + ''.join(str(int(each)) for each in is_right), 2):x}"
    return {"loss": mean(losses), "accuracy": mean(map(int, is_right)), "right": digits}


def classes(model: nn.Module, tokenizer, test: list[Question], job: Job) -> tuple[list[bool], list[float]]:
    is_right, losses = [], []
    for at in range(0, len(test), BATCH * 8):
        batch = encoded(test[at : at + BATCH * 8], job, tokenizer, {"padding": True, "max_length": job.setting[1]})
        labels = batch.pop("labels")
        logits = model(**batch).logits
        is_right += (logits.argmax(dim=-1) == labels).tolist()
        losses += F.cross_entropy(logits, labels, reduction="none").tolist()
    return is_right, losses


def endings(model: nn.Module, tokenizer, test: list[Question], job: Job) -> tuple[list[bool], list[float]]:
    """A loss is that of a question's tokens with the right ending."""
    options = [(number, option) for number, each in enumerate(test) for option in range(len(each.texts))]
    options.sort(key=lambda each: len("".join(test[each[0]].texts[each[1]])))
    scores, losses = {}, {}
    for at in range(0, len(options), BATCH * 4):
        some = [test[number].texts[option] for number, option in options[at : at + BATCH * 4]]
        texts, padding = ["".join(each) for each in some], {"padding": True, "max_length": job.setting[1]}
        ids_BT, mask_BT = tokenizer(texts, truncation=True, return_tensors="pt", **padding).to(model.device).values()
        begin_B = torch.tensor([len(tokenizer(begin)["input_ids"]) for begin, _ in some], device=model.device)
        logits = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, :-1]
        loss_BT = F.cross_entropy(logits.transpose(1, 2), ids_BT[:, 1:], reduction="none") * mask_BT[:, 1:]
        is_ending_BT = torch.arange(1, ids_BT.shape[1], device=model.device) >= begin_B[:, None]
        found = (loss_BT * is_ending_BT).sum(1).tolist(), (loss_BT.sum(1) / mask_BT[:, 1:].sum(1)).tolist()
        for each, (_, end), lost, loss in zip(options[at : at + BATCH * 4], some, *found, strict=True):
            scores[each], losses[each] = -lost / len(end.encode()), loss
    best = [max(range(len(each.texts)), key=lambda option: scores[number, option]) for number, each in enumerate(test)]
    return [chosen == each.right for chosen, each in zip(best, test, strict=True)], [
        losses[number, each.right] for number, each in enumerate(test)
    ]


if __name__ == "__main__":
    main()
