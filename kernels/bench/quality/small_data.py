"""Compares techniques for small data with the training as it is: the same documents, seed and test documents.

    python kernels/bench/quality/small_data.py FOLDER... [--model tiny] [--arms "other cuts" "general 0.1"] [--notes 24]
                                               [--tested 20] [--characters 200 1200] [--seeds 0 1 2] [--context 128]
                                               [--device cuda] [--outcomes FILE] [--minutes 8] [--record [FILE]]

Each folder has the notes of one author, of which the seed draws some to train on (and to validate and judge with, as
the product does), and others to test with. An adapter is tested in the state that the validation documents select.

averaged        the mean of the weights after each of the last third of the steps so far, where an epoch ends; read from
                the training as it is, so that it stops when that stops
other cuts      a document of several examples is cut at other places in every epoch after the first
general 0.1     a tenth as many tokens of the bundled general text as of the notes; the base model is their teacher

Goes on from the outcomes that a file has. Runs on the CPU by default, with one thread.
"""

import json
import math
import random
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter, process_time
from typing import NamedTuple
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1]))

import torch

import evidence
from sebp_edge import Recipe
from sebp_edge.events import silent
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import attach, restore, snapshot
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import BaseModel, load_base_model
from sebp_edge.models.training_hook import TrainingHook
from sebp_edge.questions.general_texts import general_examples
from sebp_edge.texts import examples as cutting
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import Drawing, make_dataset
from sebp_edge.texts.examples import encode, outlines
from sebp_edge.texts.formats import FORMATS
from sebp_edge.texts.general_probe import encode_probe
from sebp_edge.texts.readers import read_texts
from sebp_edge.texts.schedule import Schedule, make_schedules, shuffled_batches
from sebp_edge.training.comparison import compare, t_quantile
from sebp_edge.training.evaluation import HeldOutLoss
from sebp_edge.training.gate import Gate
from sebp_edge.training.run import Task, TrainingRun
from sebp_edge.training.scoring import score
from sebp_edge.training.teacher import with_teacher

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes/notes.toml", __file__)
AS_IT_IS, AVERAGED, OTHER_CUTS, GENERAL = "as it is", "averaged", "other cuts", "general"
LAST = 1 / 3


class Job(NamedTuple):
    """One training."""

    model: str
    seed: int
    folder: Path
    arm: str
    notes: int
    tested: int
    characters: tuple[int, int]
    context: int
    device: str


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--arms", nargs="+", default=[OTHER_CUTS, f"{GENERAL} 0.1"])
    parser.add_argument("--notes", type=int, default=24)
    parser.add_argument("--tested", type=int, default=20)
    parser.add_argument("--characters", type=int, nargs=2, default=[200, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--outcomes", type=Path, help="a file with a line for each job; goes on where it ends")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further job begins")
    options = parser.parse_args(arguments)
    how = (options.notes, options.tested, tuple(options.characters), options.context, options.device)
    cases = list(product(options.model, options.seeds, options.folders))
    jobs = {case: [Job(*case, arm, *how) for arm in (AS_IT_IS, *options.arms)] for case in cases}
    found, rows, together_of = run_missing([*chain.from_iterable(jobs.values())], options), [], {}
    for case, own in jobs.items():
        known = {job.arm: found[job] for job in own if job in found}
        if AS_IT_IS not in known:
            continue
        for job in own:
            for arm in found[job]["arms"] if job in found else ():
                rows.append(figures(job, arm, found[job], known[AS_IT_IS]["arms"][AS_IT_IS]))
                together_of.setdefault((case[0], arm), []).append(known)
    rows += [together(Path(model).stem, arm, each) for (model, arm), each in together_of.items()]
    evidence.record("small-data", SOURCES, rows, options.record, on_cpu=options.device == "cpu")


def run_missing(jobs: list[Job], options) -> dict[Job, dict]:
    """The results of jobs, as far as the file of outcomes has them or they were run in time."""
    file, end = options.outcomes, time.time() + 60 * options.minutes
    lines = file.read_text().splitlines() if file and file.exists() else []
    known = dict(map(json.loads, lines))
    found = {job: known[repr(job)] for job in jobs if repr(job) in known}
    for job in jobs:
        if job not in found and time.time() < end:
            found[job] = json.loads(json.dumps(measure(job)))
            if file:
                with file.open("a") as appended:
                    print(json.dumps([repr(job), found[job]]), file=appended)
    return found


# ------------------------------------------------------------------------------------------------------ the techniques


class Averages(TrainingHook):
    """Keeps, at each end of an epoch, the mean of the weights after each of the last third of the steps so far."""

    def __init__(self, adaptation):
        self._adaptation, self._states, self._num_steps, self.found = adaptation, deque(), 0, []

    def after_step(self, learning_rate: float) -> None:
        self._num_steps += 1
        self._states.append(snapshot(self._adaptation))
        while len(self._states) > max(1, round(LAST * self._num_steps)):
            self._states.popleft()

    @contextmanager
    def finished(self):
        self.found.append([torch.stack(each).mean(0) for each in zip(*self._states, strict=True)])
        yield


def cut_elsewhere(draw: random.Random, base, documents: list, context: int) -> list:
    """Returns the examples of documents; of those that have several, the first one has a length that is drawn."""

    def chunks(parts, capacity: int):
        tokenised = None
        for part in parts:
            if tokenised is None:
                tokenised = part
            else:
                tokenised.extend(part)
        total, begin, longest = len(tokenised.ids), 0, capacity
        while total - begin > capacity:
            if begin == 0:
                longest = draw.randint(capacity // 4, capacity)
            candidates = range(begin + max(1, longest // 4), min(begin + longest, total - 2) + 1)
            cut, longest = cutting._best_cut(tokenised, candidates), capacity
            yield tokenised, slice(begin, cut)
            begin = cut
        yield tokenised, slice(begin, total)

    with patch.object(cutting, "_chunks", chunks):
        return encode(documents, base.tokenizer, context)[0]


def with_other_cuts(dataset, recipe: Recipe, seed: int, base, documents: list):
    """Returns the dataset with further examples, and the schedule whose later epochs have these."""
    (split,) = dataset.splits()
    draw, trained, further, batches = random.Random(seed), {each.document for each in split.train}, [], []
    for epoch in range(recipe.epochs):
        own = split.train
        if epoch:
            examples = cut_elsewhere(draw, base, documents, dataset.context_length)
            begin = len(dataset.examples) + len(further)
            own = [each for each in outlines(examples) if each.document in trained]
            own = [each._replace(number=begin + each.number) for each in own]
            further += examples
        batches.append(shuffled_batches(own, recipe.batch_tokens, epoch + 1, seed)[epoch])
    return replace(dataset, general=further), [Schedule(batches, split.validation, split.test)]


# ------------------------------------------------------------------------------------------------------------- a case


@cache
def loaded(model: str, device: str) -> BaseModel:
    return load_base_model(
        resolve(model if model == "tiny" else Path(model)), Recipe.load("notes"), torch.device(device)
    )


def drawn(job: Job) -> tuple[list[Path], list[Path]]:
    """The files to train on, and others to test with."""
    found = (path for path in job.folder.rglob("*") if path.suffix in FORMATS)
    files = sorted(path for path in found if path.stat().st_size in range(*job.characters))
    files = random.Random(job.seed).sample(files, job.notes + job.tested)
    return files[: job.notes], files[job.notes :]


class Tested(NamedTuple):
    """The losses on test documents in nats, their tokens, and the mean loss on general text."""

    nats: dict
    tokens: dict
    general: float


def tested(model, job: Job) -> Tested:
    base = loaded(job.model, job.device)
    documents = read_texts(drawn(job)[1]).documents
    own = losses_of(model, encode(documents, base.tokenizer, job.context)[0], job)
    general = losses_of(model, encode_probe(base.tokenizer, job.context)[::4], job)
    return Tested(own.nats, own.tokens, general.mean)


def losses_of(model, examples: list, job: Job) -> HeldOutLoss:
    base = loaded(job.model, job.device)
    return score(model, examples, Collator(job.context, base.pad_token_id), base.device, silent)


@cache
def tested_before(job: Job) -> Tested:
    return tested(loaded(job.model, job.device).model, job)


def measure(job: Job) -> dict:
    """The figures of one training, and of what is averaged in it if it is as it is."""
    torch.set_num_threads(1)
    base, begun = loaded(job.model, job.device), process_time()
    before = tested_before(job._replace(arm=AS_IT_IS))
    recipe = Recipe.load("notes").replace(context_length=job.context, refit=False)
    reading = read_texts(drawn(job)[0])
    dataset = make_dataset(reading, base.tokenizer, recipe, None, Drawing(job.seed))
    if job.arm.startswith(GENERAL):
        number = round(float(job.arm.split()[1]) * dataset.num_tokens)
        general = general_examples(base.tokenizer, job.context, number, job.seed)
        collator = Collator(job.context, base.pad_token_id)
        dataset = replace(dataset, general=with_teacher(base.model, general, collator, base.device, silent))
    schedules = make_schedules(dataset, recipe, job.seed)
    if job.arm == OTHER_CUTS:
        dataset, schedules = with_other_cuts(dataset, recipe, job.seed, base, reading.documents)
    validation = [dataset.examples[each.number] for each in dataset.splits()[0].validation]
    hooks = []

    def attach_with_hook(*how):
        adaptation = attach(*how)
        hooks.append(Averages(adaptation))
        adaptation.training_hook = lambda: hooks[0]
        return adaptation

    with MemoryGuard(base.device) as guard:
        how = attach_with_hook if job.arm == AS_IT_IS else attach
        task = Task(dataset, schedules, recipe, job.seed, MemoryOptions())
        run = TrainingRun(base, task, guard, silent, how, perf_counter)
        kept = run.train(Gate(recipe.margin, dataset.draw.cluster_of)).passed
        (progress,), model = run.progress, run.adaptation.model
        about = {"kept": kept, "steps": progress.steps, "validation": progress.best_loss}
        found = {job.arm: tested(model, job)._asdict() | about | {"best epoch": progress.best_epoch}}
        for hook in hooks:
            best, at = math.inf, None
            for epoch, state in enumerate(hook.found, start=1):
                restore(run.adaptation, state)
                if (loss := losses_of(model, validation, job).mean) < best:
                    best, at = loss, epoch
            restore(run.adaptation, hook.found[at - 1])
            found[AVERAGED] = tested(model, job)._asdict() | {
                "steps": progress.steps,
                "validation": best,
                "best epoch": at,
            }
        run.detach()
    for each in found.values():
        each["general"] = each["general"] / before.general - 1
    files = ["/".join(each.parts[-3:]) for each in drawn(job)[1]]
    spent = {"seconds": process_time() - begun}
    means = {arm: HeldOutLoss(each["nats"], each["tokens"]).mean for arm, each in found.items()}
    evidence.show({"model": Path(job.model).stem, "texts": job.folder.name, "seed": job.seed} | means | about | spent)
    return {"before": before._asdict(), "files": files, "arms": found} | spent


# --------------------------------------------------------------------------------------------------------- the figures


def losses(found: dict) -> HeldOutLoss:
    return HeldOutLoss(found["nats"], found["tokens"])


def interval(before: HeldOutLoss, after: HeldOutLoss, unit_of: dict) -> dict:
    """The gain, and the bounds of the project's comparison on either side."""
    found = compare(before, after, unit_of)
    return {"gain": found.gain, "at least": found.lower, "at most": 2 * found.gain - found.lower}


def figures(job: Job, arm: str, found: dict, as_it_is: dict) -> dict:
    own = found["arms"][arm]
    row = {"model": Path(job.model).stem, "texts": job.folder.name, "seed": job.seed, "arm": arm, "cases": 1}
    row |= {"documents": len(own["nats"]), "tokens": sum(own["tokens"].values())}
    row |= {"base loss": losses(found["before"]).mean, "loss": losses(own).mean}
    row |= interval(losses(as_it_is), losses(own), {each: each for each in own["nats"]})
    return evidence.show(row | {key: own.get(key) for key in ("general", "best epoch", "steps", "validation", "kept")})


def together(model: str, arm: str, cases: list[dict[str, dict]]) -> dict:
    """All cases together; a document that several cases test is one unit."""
    parts, unit_of, units = [HeldOutLoss() for _ in range(3)], {}, {}
    for case, found in enumerate(cases):
        for part, each in zip(parts, (found[AS_IT_IS]["before"], arms(found)[AS_IT_IS], arms(found)[arm]), strict=True):
            part.nats |= {(case, number): value for number, value in each["nats"].items()}
            part.tokens |= {(case, number): value for number, value in each["tokens"].items()}
        names = found[AS_IT_IS]["files"]
        unit_of |= {
            (case, number): units.setdefault(names[int(number)], len(units)) for number in arms(found)[arm]["nats"]
        }
    base, as_it_is, own = parts
    row = {"model": model, "texts": "all", "seed": "all", "arm": arm, "cases": len(cases), "documents": len(units)}
    row |= {
        "tokens": sum(own.tokens.values()),
        "base loss": base.mean,
        "loss": own.mean,
        **interval(as_it_is, own, unit_of),
    }
    row["general"] = mean(arms(found)[arm]["general"] for found in cases)
    gains = [1 - losses(arms(each)[arm]).mean / losses(arms(each)[AS_IT_IS]).mean for each in cases]
    row |= {"better": sum(gain > 0 for gain in gains), "mean of cases": mean(gains)}
    error = stdev(gains) / len(gains) ** 0.5 * t_quantile(len(gains) - 1, 0.975) if len(gains) > 1 else math.nan
    return evidence.show(row | {"cases at least": mean(gains) - error, "cases at most": mean(gains) + error})


def arms(found: dict[str, dict]) -> dict[str, dict]:
    return {arm: each for job in found.values() for arm, each in job["arms"].items()}


if __name__ == "__main__":
    main()
