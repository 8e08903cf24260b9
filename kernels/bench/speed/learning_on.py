"""Measures what learning on saves: the time and the test loss beside those of learning all documents again.

    python kernels/bench/speed/learning_on.py [--sizes 60 1000] [--seeds 0 1 2] [--model tiny] [--device cpu]
                                        [--record [FILE]]

A first version learns the notes. Then some change and some are new, and two adaptations begin at that version: one
learns on, one starts over. Both run in this process, in turns, after a first one that is not timed. Time is that of
training and evaluation only: of the active version, the base model and the new one on the test documents, and of the
validation documents.

The notes are chains of words, drawn by the seed: each word follows the one before it somewhere in examples/notes.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import AdapterStore, AdaptResult, Personalizer
from sebp_edge.machine.devices import pick_device
from sebp_edge.texts.readers import read_texts
from sebp_edge.training.run import TrainingRun

SOURCES = (*evidence.STEP, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes/notes.toml", __file__)
# The notes of the first version, with how many of them change and how many are new.
CHANGES = {60: (1, 3), 1000: (0, 10)}
ARMS = {"learning on": False, "all again": True}
# Words of a note: the median, and the spread of its logarithm.
WORDS, SPREAD = 45, 0.6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(CHANGES), choices=CHANGES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    records = []
    for size in options.sizes:
        for seed in options.seeds:
            found = measure(size, seed, options.model, options.device)
            records += [{"model": Path(options.model).name} | row for row in found]
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        name = "learning-on" if options.model == "tiny" else f"learning-on-{Path(options.model).name}"
        evidence.record(name, SOURCES, records, options.record, on_cpu)


def measure(size: int, seed: int, model: str, device: str | None) -> list[dict]:
    """One row for each arm, all from one first version."""
    num_changed, num_new = CHANGES[size]
    notes = list(chain_notes(size + num_new, seed))
    later = [*notes[:num_changed], *notes[num_changed:]]
    for number in range(num_changed):
        words = later[number].split(" ")
        later[number] = " ".join([*words[: len(words) * 3 // 4], *next(chain_notes(1, seed + 1000)).split(" ")[:10]])
    unknown = {*range(num_changed), *range(size, size + num_new)}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        personalizer = Personalizer(model, device=device, seed=seed, store=AdapterStore(first))
        personalizer.adapt(notes[:size], activate_anyway=True)
        for arm, fresh in ARMS.items():
            own = Path(folder) / arm
            shutil.copytree(first, own)
            personalizer.store = AdapterStore(own)
            with timed(unknown) as figures:
                result = personalizer.adapt(later, fresh=fresh, activate_anyway=True)
            found.append(row(size, seed, arm, result, figures))
            print(*(f"{value:.3f}" if isinstance(value, float) else value for value in found[-1].values()), flush=True)
    return found


def row(size: int, seed: int, arm: str, result: AdaptResult, figures: dict) -> dict:
    return {
        "notes": size,
        "seed": seed,
        "arm": arm,
        "seconds": figures["seconds"],
        "test_loss": result.heldout_loss_after,
        "over_active": result.gain_over_active,
        "loss_of_new": figures["loss_of_new"],
        "verdict": result.verdict,
    }


@contextmanager
def timed(unknown: set[int]) -> Iterator[dict]:
    """Yields the time of training and evaluation, and the loss on the new documents that the final state ends with."""
    figures, train, score = {"seconds": 0.0}, TrainingRun.train, TrainingRun.score

    def timed_call(function, *arguments):
        begin = time.perf_counter()
        result = function(*arguments)
        figures["seconds"] += time.perf_counter() - begin
        return result

    def timed_train(run, gate):
        result = timed_call(train, run, gate)
        examples = [each for each in run.task.dataset.outlines.trained if each.document in unknown]
        figures["loss_of_new"] = score(run, run.adaptation, examples).mean
        return result

    TrainingRun.train = timed_train
    TrainingRun.score = lambda run, *arguments: timed_call(score, run, *arguments)
    try:
        yield figures
    finally:
        TrainingRun.train, TrainingRun.score = train, score


def chain_notes(number: int, seed: int) -> Iterator[str]:
    """Yields texts in which each word follows the one before it somewhere in examples/notes."""
    following, draw = defaultdict(list), random.Random(seed)
    for document in read_texts(evidence.ROOT / "examples" / "notes").documents:
        words = document.content.split()
        for word, next_word in pairwise(words):
            following[word].append(next_word)
    beginnings = sorted(word for word in following if word[:1].isupper())
    for _ in range(number):
        words = [draw.choice(beginnings)]
        for _ in range(max(12, round(WORDS * draw.lognormvariate(0, SPREAD)))):
            words.append(draw.choice(following.get(words[-1]) or beginnings))
        yield " ".join(words)


if __name__ == "__main__":
    main()
