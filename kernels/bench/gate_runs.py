"""Trains many adapters on random notes and records their losses, from which `gate.py` chooses the gate's test.

    python kernels/bench/gate_runs.py FOLDER FOLDER --out FILE.npz [--minutes 7] [--processes N] [--short]

Each folder has the notes of one author. Some of an author's notes are the population: every adapter is evaluated on all
of them, so its true gain there is known exactly. A run is trained like `Personalizer.adapt` trains, with the bundled
model and the recipe `notes`, on `size` random notes:

- from FOLDS_BELOW notes on, on notes outside the population; test documents are drawn from the population afterwards;
- below, in folds, on notes of the population; the true gain of a fold is that on all notes that its training has not
  seen, of which the fold's test documents are a random sample.

Two runs with different seeds share their notes and splits. The file has, for each size, arrays with one row per run:

    case, author, subset, seed      what was trained on; runs with one `subset` share notes and splits
    gains                           relative gain of each document of the population, or of each test document, float16
    documents                       folds only: the test documents, fold by fold, as positions in the population
    truths                          folds only: the true gain of each fold

and for each author `nats` (of the base model) and `tokens` of the population. Jobs are in random order, so that those
that fit into the minutes are a fair share.
"""

import argparse
import multiprocessing
import os
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sebp_edge.events import silent
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.adaptation import attach, snapshot
from sebp_edge.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.documents import Document, own_text
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import read_texts
from sebp_edge.texts.schedule import Group, Schedule, shuffled_batches
from sebp_edge.texts.split_history import Fingerprint, take_fingerprints
from sebp_edge.texts.splits import FOLDS_BELOW, Split, draw_splits
from sebp_edge.training.evaluation import HeldOutLoss, evaluate
from sebp_edge.training.loop import Trainer
from sebp_edge.training.recovery import RecoveringLearner

SIZES = (6, 13, 50, 200)
POPULATION = 250
# What is trained on, and the learning rate as a multiple of the recipe's 5e-4; the last four should learn nothing.
CASES = {
    "own": 1.0,
    "own, a tenth of the rate": 0.1,
    "rate 1e-9": 1e-9 / 5e-4,
    "rate 1e-6": 1e-6 / 5e-4,
    "shuffled words": 1.0,
    "other author": 1.0,
}
# Jobs of two runs by case, for each size.
JOBS = {
    "own": (600, 600, 200, 120),
    "own, a tenth of the rate": (100, 100, 60, 30),
    "rate 1e-9": (20, 20, 10, 6),
    "rate 1e-6": (20, 20, 10, 6),
    "shuffled words": (30, 30, 20, 12),
    "other author": (30, 30, 20, 12),
}
SHORT_JOBS = {case: (1, 0, 1, 0) if case == "own" else (1, 0, 0, 0) for case in CASES}
# Initial weights; a job's two runs use neighbours.
NUM_SEEDS = 8


class Job(NamedTuple):
    """Two runs that share their notes and splits."""

    number: int
    case: str
    size: int

    @property
    def author(self) -> int:
        return self.number % 2

    @property
    def seeds(self) -> tuple[int, int]:
        first = 2 * (self.number // 2) % NUM_SEEDS
        return first, first + 1


class Work(NamedTuple):
    """What one process does: its share of the jobs, until `end` on the monotonic clock."""

    folders: list[Path]
    device: str | None
    population: int
    jobs: list[Job]
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--device")
    parser.add_argument("--short", action="store_true", help="a few jobs and a small population, to try it out")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    jobs = make_jobs(SHORT_JOBS if options.short else JOBS)
    works = [
        Work(options.folders, options.device, 16 if options.short else POPULATION, jobs[rank :: options.processes], end)
        for rank in range(options.processes)
    ]
    # Read by the math libraries of the processes when they start.
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pending = [pool.apply_async(run_share, [work]) for work in works]
        shares = list(finished(pending, end + 90))
    arrays = {name: array for share in shares for name, array in share.pop("authors", {}).items()}
    arrays |= as_arrays([row for share in shares for row in share["rows"]])
    np.savez_compressed(options.out, names=[folder.name for folder in options.folders], cases=list(CASES), **arrays)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


def finished(pending: list[AsyncResult], end: float) -> Iterator[dict]:
    """Yields the shares of the processes that have not died or stalled."""
    for number, share in enumerate(pending):
        try:
            yield share.get(max(1.0, end - time.monotonic()))
        except multiprocessing.TimeoutError:
            print(f"process {number} has not finished; its runs are left out")


def make_jobs(counts: dict[str, tuple[int, ...]]) -> list[Job]:
    kinds = [
        (case, size)
        for case, of_sizes in counts.items()
        for size, count in zip(SIZES, of_sizes, strict=True)
        for _ in range(count)
    ]
    random.Random(0).shuffle(kinds)
    return [Job(number, *kind) for number, kind in enumerate(kinds)]


def run_share(work: Work) -> dict:
    """Runs the jobs of one process; after an error, returns what was done before."""
    torch.set_num_threads(1)
    begin, rows, runner = time.monotonic(), [], None
    try:
        runner = Runner(work)
        print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
        for job in work.jobs:
            if time.monotonic() > work.end:
                break
            before = time.monotonic()
            rows += [runner.run(job, seed) for seed in job.seeds]
            print(f"{time.monotonic() - before:7.1f} s  {job.size:>4}  {job.case}", flush=True)
    except Exception:
        traceback.print_exc()
    return {"rows": rows} | ({"authors": runner.arrays()} if runner else {})


def as_arrays(rows: list[dict]) -> dict[str, np.ndarray]:
    """Returns the rows of each size as arrays named "<size> <column>"."""
    by_size = defaultdict(list)
    for row in rows:
        by_size[row.pop("size")].append(row)
    return {
        f"{size} {column}": np.array([row[column] for row in same], dtype)
        for size, same in by_size.items()
        for column, dtype in DTYPES.items()
        if column in same[0]
    }


DTYPES = {
    "case": np.uint8,
    "author": np.uint8,
    "subset": np.uint16,
    "seed": np.uint8,
    "gains": np.float16,
    "documents": np.uint16,
    "truths": np.float32,
}


@dataclass
class Author:
    """The notes of one author, as examples by document.

    Attributes:
        population: the documents that every adapter is evaluated on.
        others: all other documents.
        group: the population, cut into micro-batches; always the same ones, so that rounding cancels out.
        before: the base model's loss on the population.
    """

    documents: list[Document]
    examples: dict[int, list[Example]]
    fingerprints: dict[int, Fingerprint]
    population: list[int]
    others: list[int]
    group: Group | None = None
    before: HeldOutLoss | None = None

    def of(self, documents: list[int]) -> list[Example]:
        return [example for document in documents for example in self.examples[document]]


class Runner:
    """Trains and evaluates in one process: one model and one learner, so that graphs are captured only once."""

    def __init__(self, work: Work):
        self.recipe = Recipe.load("notes").with_defaults()
        self.base = load_base_model(resolve(DEFAULT_MODEL), self.recipe, pick_device(work.device))
        self.authors = [self._read(folder, work.population) for folder in work.folders]
        self.states = [self._initial_state(seed) for seed in range(NUM_SEEDS)]
        everything = [example for author in self.authors for example in author.of(author.others)]
        collator = Collator(self.recipe.context_length, self.base.pad_token_id)
        self.learner = RecoveringLearner(attach(self.base, self.recipe, 0), self.recipe, everything, collator, silent)
        for author in self.authors:
            schedule = self._schedule(author.of(author.others[:200]), [], author.of(author.population), seed=0)
            self.learner.prepare(schedule)
            author.group = schedule.test
            author.before = evaluate(self.learner, author.group)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            f"author {number} {name}": np.array(
                [getattr(author.before, name)[each] for each in author.population], dtype
            )
            for number, author in enumerate(self.authors)
            for name, dtype in (("nats", np.float32), ("tokens", np.uint16))
        }

    def run(self, job: Job, seed: int) -> dict:
        """Trains one run; returns its row."""
        author, chosen = self.authors[job.author], random.Random(job.number)
        in_folds = job.size < FOLDS_BELOW
        pool = author.population if in_folds else author.others
        documents = chosen.sample(pool, job.size)
        draw = draw_splits({document: author.fingerprints[document] for document in documents}, job.number)
        splits = draw.splits(author.of(documents))
        row = {
            "size": job.size,
            "case": list(CASES).index(job.case),
            "author": job.author,
            "subset": job.number,
            "seed": seed,
        }
        if not in_folds:
            after = self._train(job, author, splits[0], seed)
            return row | {"gains": [_gain(author.before, after, [document]) for document in author.population]}
        tested, found, truths = [], [], []
        for split in splits:
            seen = _documents(split.train) | _documents(split.validation)
            after = self._train(job, author, split, seed)
            test = sorted(_documents(split.test))
            tested += [author.population.index(document) for document in test]
            found += [_gain(author.before, after, [document]) for document in test]
            truths.append(_gain(author.before, after, [each for each in author.population if each not in seen]))
        return row | {"documents": tested, "gains": found, "truths": truths}

    def _read(self, folder: Path, population: int) -> Author:
        documents, examples = read_texts(folder).documents, defaultdict(list)
        for example in encode(documents, self.base.tokenizer, self.recipe.context_length)[0]:
            examples[example.document].append(example)
        fingerprints = take_fingerprints({each: own_text(documents[each].content) for each in examples}, b"")
        # Of near-duplicates only one stays, so that each document is a cluster in every draw.
        document_of = {own: each for each, own in draw_splits(fingerprints, 0).cluster_of.items()}
        order = sorted(document_of.values())
        random.Random(0).shuffle(order)
        return Author(documents, dict(examples), fingerprints, order[:population], order[population:])

    def _initial_state(self, seed: int) -> list[torch.Tensor]:
        adaptation = attach(self.base, self.recipe, seed)
        state = snapshot(adaptation)
        adaptation.detach()
        return state

    def _train(self, job: Job, author: Author, split: Split, seed: int) -> HeldOutLoss:
        """Trains on the case's variant of a split; returns the loss on the population."""
        train = self._train_examples(job, split.train)
        recipe = self.recipe.replace(learning_rate=self.recipe.learning_rate * CASES[job.case])
        self.learner.start_again(self.states[seed])
        schedule = self._schedule(train, split.validation, [], seed)
        # Not `prepare`, which would plan more graphs for each training.
        schedule.lay_out(self.learner.limit, one_micro_batch_each=not self.learner.inner.can_accumulate)
        Trainer(self.learner, recipe, silent, "train").train(schedule)
        return evaluate(self.learner, author.group)

    def _train_examples(self, job: Job, train: list[Example]) -> list[Example]:
        order = random.Random(job.number)
        author, other = self.authors[job.author], self.authors[1 - job.author]
        if job.case == "other author":
            return other.of(order.sample(other.others, len(_documents(train))))
        if job.case != "shuffled words":
            return train
        shuffled = []
        for number in sorted(_documents(train)):
            words = author.documents[number].content.split()
            shuffled.append(Document("", " ".join(order.sample(words, len(words)))))
        return encode(shuffled, self.base.tokenizer, self.recipe.context_length)[0]

    def _schedule(self, train, validation, test, seed: int) -> Schedule:
        return Schedule(shuffled_batches(train, self.recipe.batch_tokens, self.recipe.epochs, seed), validation, test)


def _gain(before: HeldOutLoss, after: HeldOutLoss, documents: list[int]) -> float:
    """The relative gain on some documents."""
    return 1 - sum(after.nats[each] for each in documents) / sum(before.nats[each] for each in documents)


def _documents(examples: list[Example]) -> set[int]:
    return {example.document for example in examples}


if __name__ == "__main__":
    main()
