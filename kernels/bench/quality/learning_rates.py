"""Compares a learning rate that is chosen by measuring with every stated one, and with the best by validation.

    python kernels/bench/quality/learning_rates.py FOLDER... [--model tiny ...] [--notes 41] [--characters 200 3000]
                                                    [--seeds 0 1 2] [--recipe notes] [--device cpu] [--processes 1]
                                                    [--outcomes FILE] [--minutes 8] [--record [FILE]]

Each folder has the notes of one author, of which the seed draws some. Gains are on the test documents, of the states
that were judged. The sweep's choice is the rate whose full training has the lowest validation loss. Goes on from the
outcomes that a file has; after the minutes, only cases with all rates count.
"""

import random
import sys
import tempfile
import threading
from functools import cache
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.adapters.saved import SavedAdapter
from sebp_edge.errors import Interrupted
from sebp_edge.machine.devices import pick_device
from sebp_edge.recipe import AUTO
from sebp_edge.run.model_in_use import ModelInUse
from sebp_edge.run.work_ahead import COPIES, GENERAL, SAMPLES
from sebp_edge.texts.formats import FORMATS
from sebp_edge.training.rates import ORDER, USUAL

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes", __file__)
# Beyond both ends of those that are tried.
SWEEP = (5e-5, *sorted(ORDER), 5e-3)
RESAMPLES = 10_000


class Job(NamedTuple):
    """One adaptation, with a stated rate or with the one that it chooses."""

    model: str
    seed: int
    folder: Path
    rate: float | str
    recipe: str
    notes: int
    characters: tuple[int, int]
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--notes", type=int, default=41)
    parser.add_argument("--characters", type=int, nargs=2, default=[200, 3000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="notes")
    side_by_side.add_options(parser)
    options = parser.parse_args(arguments)
    how = (options.recipe, options.notes, tuple(options.characters), options.device)
    cases = list(product(options.model, options.seeds, options.folders))
    jobs = {case: [Job(*case, rate, *how) for rate in (AUTO, *SWEEP)] for case in cases}
    found = side_by_side.run_missing(measure, [*chain.from_iterable(jobs.values())], options)
    complete = [[found[job] for job in jobs[case]] for case in cases if found.keys() >= {*jobs[case]}]
    records = [*chain.from_iterable(complete)]
    for model in dict.fromkeys(row["model"] for row in records):
        print(model, summary([case for case in complete if case[0]["model"] == model]), flush=True)
    on_cpu = pick_device(options.device).type == "cpu"
    evidence.record("learning-rates-cpu" if on_cpu else "learning-rates", SOURCES, records, options.record, on_cpu)


def measure(job: Job) -> dict:
    """The figures of one adaptation; a stated rate is not trained with on all documents afterwards."""
    recipe = Recipe.load(job.recipe).replace(learning_rate=job.rate, refit=None if job.rate == AUTO else False)
    texts = notes(job.folder, job.notes, range(*job.characters), job.seed)
    with tempfile.TemporaryDirectory() as folder:
        store = AdapterStore(folder)
        personalizer = Personalizer(job.model, recipe=recipe, device=job.device, seed=job.seed, store=store)
        personalizer.in_use = loaded(job.model, job.device)
        saved = adapt_and_judge(personalizer, texts)
        report = saved.report().training
    tried = report.rates.tried if report.rates else ()
    row = {
        "model": Path(job.model).stem,
        "texts": job.folder.name,
        "recipe": job.recipe,
        "seed": job.seed,
        "stated": job.rate,
        "chosen": saved.record.recipe["learning_rate"],
        "tried": " ".join(f"{each.learning_rate:g}:{each.loss}" for each in tried),
        "validation": min(report.curves[0].validation),
        "gain": report.tested.gains.over_base,
        "at_least": report.tested.gains.over_base_at_least,
        "verdict": saved.record.verdict,
    }
    return evidence.show(row)


def notes(folder: Path, number: int, characters: range, seed: int) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS and path.stat().st_size in characters)
    return random.Random(seed).sample(files, min(number, len(files)))


@cache
def loaded(model: str, device: str | None) -> ModelInUse:
    """The model, which all jobs of a process share."""
    return Personalizer(model, recipe="notes", device=device).in_use


def adapt_and_judge(personalizer: Personalizer, texts, fresh: bool = False) -> SavedAdapter:
    """Adapts, and stops after the gate has judged: before samples, general text and what is copied."""
    stop = threading.Event()

    def end_after_the_gate(event) -> None:
        if getattr(event, "phase", None) in (SAMPLES, GENERAL, COPIES):
            stop.set()

    personalizer.on_event = end_after_the_gate
    try:
        return personalizer.adapt(texts, fresh=fresh, stop_when=stop).saved
    except Interrupted as interrupted:
        return personalizer.store.adapter(interrupted.name).open(interrupted.version)


def summary(cases: list[list[dict]]) -> str:
    """The mean gains, and what choosing gains as a share of what the sweep gains, with a 95 % interval over cases."""
    swept = [min(case[1:], key=lambda row: row["validation"])["gain"] for case in cases]
    chosen, usual = ([row["gain"] for case in cases for row in case if row["stated"] == rate] for rate in (AUTO, USUAL))
    stated = {f"{rate:g}": [row["gain"] for case in cases for row in case if row["stated"] == rate] for rate in SWEEP}
    gains = {"the rate chosen": chosen, "the sweep's": swept} | stated
    lines = [f"{mean(each):.2%} with {name}" for name, each in gains.items()]
    for name, others in (("the sweep", swept), (f"{USUAL:g}", usual)):
        lines.append(f"chosen / {name} {share(chosen, others)}")
    return f"{len(cases)} cases: " + "; ".join(lines)


def share(gains: list[float], others: list[float]) -> str:
    """The ratio of two sums over the same cases, with a 95 % interval."""
    draw, shares = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = draw.choices(range(len(gains)), k=len(gains))
        shares.append(sum(gains[each] for each in drawn) / sum(others[each] for each in drawn))
    low, high = sorted(shares)[RESAMPLES // 40], sorted(shares)[-RESAMPLES // 40]
    return f"{sum(gains) / sum(others):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
