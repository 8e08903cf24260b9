"""Trains real models with dense gradients and with SEBP, and asks them questions: the paper's Table 9, Figures 5, 7.

    python kernels/bench/quality/paper_tables.py DATA --decoder MODEL [--encoder FOLDER] [--tasks arc-c ...] [--seeds 0]
        [--variants dense exact] [--steps 60] [--asked 1000] [--processes 7] [--device cuda] [--record [FILE]]

DATA has the publishers' files. All weights are trained, in fp32, with AdamW and a constant rate, on batches of 8 padded
texts: a decoder on questions with their right endings and a loss on every token, an encoder with a new head on classes.
All are asked the same other questions, in TF32; a decoder's answer is the ending with the largest log-probability per
byte. The seed sets the texts, their order, the head and the dropout: each variant is compared with "dense" in a seed.
"published" is the code published with the paper: each linear layer but the head computes dX for the first n rows,
whatever they hold, and never dW. n is a fifth of the padded rows, for "top n" too. Gradients are compared first.
"""

import bz2
import copy
import csv
import gc
import json
import lzma
import random
import sys
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
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model, without_progress_bars
from sebp_edge.research import Threshold, TopN, sparsify

SOURCES = (*evidence.OPS, *(f"sebp_edge/{each}" for each in ("engine/models", "research", "engine/sparse")), __file__)
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
BATCH, ASKED_AT_ONCE, PARTS, IGNORE, RESAMPLES = 8, 16, 10, -100, 2000


class Question(NamedTuple):
    """A beginning and an ending for each option, or the texts of a class; and the number of what is right."""

    texts: list
    right: int


class Job(NamedTuple):
    task: str
    seed: int
    variant: str

    @property
    def is_choice(self) -> bool:
        return FILES[self.task][0].startswith("lm")


class Learner:
    """The model of a job, and what it learns. The seed fixes a new head, and torch's random state after it."""

    def __init__(self, options: Namespace, job: Job):
        gc.collect()  # the model of an earlier job, whose layers know each other
        torch.manual_seed(job.seed)
        self.job, self.device = job, options.device or "cuda"
        self.train, self.test = questions(options.data, job.task, options.asked)
        if job.is_choice:
            self.name, self.context, self.steps, self.rate = options.decoder, 256, options.steps or 60, 5e-5
            base = pretrained(self.name)
            self.model, self.tokenizer = copy.deepcopy(base.model), base.tokenizer
            self.tokenizer.pad_token, self.tokenizer.padding_side = self.tokenizer.eos_token, "right"
        else:  # the paper's rate
            self.name, self.context, self.steps, self.rate = options.encoder, 128, options.steps or 250, 1.23e-4
            logging.set_verbosity_error()  # of the head, which is new
            with without_progress_bars():
                self.model = AutoModelForSequenceClassification.from_pretrained(self.name, dtype=torch.float32)
            self.tokenizer = AutoTokenizer.from_pretrained(self.name)
        self.model.to(self.device)

    def batches(self) -> list[dict[str, Tensor]]:
        drawn = random.Random(self.job.seed).sample(self.train, self.steps * BATCH)
        return [self.encoded(drawn[at : at + BATCH], "max_length") for at in range(0, len(drawn), BATCH)]

    def encoded(self, some: list[Question], padding: str | bool) -> dict[str, Tensor]:
        rows = [["".join(each.texts[each.right])] if self.job.is_choice else each.texts for each in some]
        batch = self.tokens(*map(list, zip(*rows, strict=True)), padding=padding)
        labels = torch.tensor([each.right for each in some], device=self.device)
        if self.job.is_choice:
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
        return {**batch, "labels": labels}

    def tokens(self, *texts: list[str], padding: str | bool = True):
        cut = {"truncation": True, "max_length": self.context}
        return self.tokenizer(*texts, padding=padding, return_tensors="pt", **cut).to(self.device)

    def backward_pass(self, variant: str, n: int) -> AbstractContextManager:
        if variant == "published":
            for name, layer in self.model.named_modules():
                if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] not in ("lm_head", "classifier"):
                    layer.forward = partial(with_first_rows, layer, n)
        rules = {"exact": "exact", "top n": TopN(max(1, n)), "threshold": Threshold()}
        return sparsify(self.model, rows=rules[variant]) if variant in rules else nullcontext()

    @torch.no_grad()
    def ask(self) -> dict:
        """The mean loss of what is right per token or text, the share of right answers, and which: see `bits`."""
        self.model.eval()
        torch.set_float32_matmul_precision("high")
        is_right, losses = zip(*(self.endings() if self.job.is_choice else self.classes()), strict=True)
        torch.set_float32_matmul_precision("highest")
        digits = f"{int('1' + ''.join(str(int(each)) for each in is_right), 2):x}"
        return {"loss": mean(losses), "accuracy": sum(is_right) / len(is_right), "right": digits}

    def classes(self) -> Iterator[tuple[bool, float]]:
        for at in range(0, len(self.test), ASKED_AT_ONCE):
            batch = self.encoded(self.test[at : at + ASKED_AT_ONCE], True)
            labels = batch.pop("labels")
            logits = self.model(**batch).logits
            is_right = (logits.argmax(dim=-1) == labels).tolist()
            yield from zip(is_right, F.cross_entropy(logits, labels, reduction="none").tolist(), strict=True)

    def endings(self) -> Iterator[tuple[bool, float]]:
        options = [(number, option) for number, each in enumerate(self.test) for option in range(len(each.texts))]
        options.sort(key=lambda each: len("".join(self.test[each[0]].texts[each[1]])))
        found = {}
        for at in range(0, len(options), ASKED_AT_ONCE):
            some = options[at : at + ASKED_AT_ONCE]
            texts = [self.test[number].texts[option] for number, option in some]
            batch = self.tokens(["".join(each) for each in texts])
            ids_BT, mask_BT = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
            logits = self.model(**batch).logits[:, :-1].flatten(0, 1)
            loss_BT = F.cross_entropy(logits, ids_BT.flatten(), reduction="none").view(ids_BT.shape) * mask_BT
            loss_BT, mask_BT = loss_BT.cpu(), mask_BT.cpu()
            lengths = [len(self.tokenizer(begin)["input_ids"]) for begin, _ in texts]
            for each, (_, end), begin, loss_T, mask_T in zip(some, texts, lengths, loss_BT, mask_BT, strict=True):
                of_end = float(loss_T[begin - 1 :].sum())
                found[each] = -of_end / len(end.encode()), float(loss_T.sum() / mask_T.sum())
        for number, each in enumerate(self.test):
            best = max(range(len(each.texts)), key=lambda option: found[number, option][0])
            yield best == each.right, found[number, each.right][1]


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--decoder", type=Path, required=True)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--tasks", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--asked", type=int, default=1000)
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1, help="jobs that run at once")
    options = parser.parse_args()
    jobs = [Job(task, seed, name) for seed, task, name in product(options.seeds, options.tasks, options.variants)]
    one_of_each = list({job.is_choice: job for job in jobs}.values())
    for compared in side_by_side.run(partial(compare_gradients, options), one_of_each, options.processes):
        print(compared, flush=True)
    found = {}
    for row in side_by_side.run(partial(measure, options), jobs, options.processes):
        found[Job(row["texts"], row["seed"], row["variant"])] = evidence.show(row)
    for task, variant in product(options.tasks, options.variants):
        seeds = [seed for seed in options.seeds if {Job(task, seed, "dense"), Job(task, seed, variant)} <= found.keys()]
        pairs = [(found[task, seed, variant], found[task, seed, "dense"]) for seed in seeds]
        if pairs:
            print(f"{task}, {variant}: {difference(pairs, '_before' * (variant == 'dense'))}", flush=True)
    rows = [found[job] for job in jobs if job in found]
    evidence.record("paper-tables", SOURCES, rows, options.record, options.device == "cpu")


def difference(pairs: list[tuple[dict, dict]], suffix: str) -> str:
    """Mean accuracy and loss, and how much more they are; the 95 % interval resamples seeds and questions."""
    more_SQ = torch.stack([bits(row["right"]) - bits(other[f"right{suffix}"]) for row, other in pairs])
    draw = torch.Generator().manual_seed(0)
    seeds_RS, asked_RQ = (torch.randint(size, (RESAMPLES, size), generator=draw) for size in more_SQ.shape)
    means_R = torch.stack([more_SQ[seeds][:, asked].mean() for seeds, asked in zip(seeds_RS, asked_RQ, strict=True)])
    low, high = means_R.quantile(torch.tensor([0.025, 0.975])).tolist()
    accuracy, loss = (mean(row[name] for row, _ in pairs) for name in ("accuracy", "loss"))
    more = mean(row["loss"] - other[f"loss{suffix}"] for row, other in pairs)
    return f"accuracy {accuracy:.4f}, {more_SQ.mean():+.4f} ({low:+.4f} to {high:+.4f}); loss {loss:.4f}, {more:+.2g}"


def bits(digits: str) -> Tensor:
    """Which answers are right: behind a first one, the bits of a hexadecimal number."""
    return torch.tensor([float(bit) for bit in f"{int(digits, 16):b}"[1:]])


def measure(options: Namespace, job: Job) -> dict:
    """Trains once; returns a row of the result."""
    learner, losses = Learner(options, job), []
    before = learner.ask() if job.variant == "dense" else {}
    batches, kinds = learner.batches(), [each.right for each in learner.test]
    rows, steps = batches[0]["input_ids"].numel(), learner.steps
    optimizer = torch.optim.AdamW(learner.model.train().parameters(), lr=learner.rate, weight_decay=0.0)
    with learner.backward_pass(job.variant, rows // 5) as handle:
        for batch in batches:
            loss = learner.model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        dropped = handle.dropped() if handle else []
    row = {"model": learner.name.stem, "texts": job.task, "variant": job.variant, "seed": job.seed, "steps": steps}
    row |= {"rows": rows, "active": mean(int(each["attention_mask"].sum()) for each in batches)}
    row["kept"] = sum(each.kept for each in dropped) / sum(each.active for each in dropped) if dropped else None
    row |= {"asked": len(kinds), "most_frequent": kinds.count(mode(kinds)) / len(kinds), **learner.ask()}
    row |= {f"{name}_before": value for name, value in before.items()}
    for part in range(PARTS):
        row[f"train_{part}"] = mean(losses[part * steps // PARTS : (part + 1) * steps // PARTS] or losses)
    return row


def compare_gradients(options: Namespace, job: Job) -> str:
    """Compares the gradients of a batch with dense ones, in the drop-in's second pass, which reads the labels."""
    learner, found = Learner(options, job), []
    model, batch = learner.model.eval(), learner.batches()[0]
    for variant in ("dense", "exact"):
        with learner.backward_pass(variant, 0):
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


def with_first_rows(layer: nn.Linear, n: int, x: Tensor) -> Tensor:
    """The layer's output with dX for the first n rows of the flattened batch only, and no dW."""
    is_first = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1) < n
    return F.linear(torch.where(is_first, x, x.detach()), layer.weight.detach(), layer.bias)


if __name__ == "__main__":
    main()
