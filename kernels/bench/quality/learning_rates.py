"""Compares a learning rate that is chosen by measuring with every stated one, and with the best by validation.

    python kernels/bench/quality/learning_rates.py FOLDER... [--model tiny ...] [--notes 41] [--characters 200 3000]
                                                    [--seeds 0 1 2] [--recipe notes] [--device cpu] [--record [FILE]]

Each folder has the notes of one author, of which the seed draws some. Gains are on the test documents, of the states
that were judged. The sweep's choice is the rate whose full training has the lowest validation loss.
"""

import random
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.recipe import AUTO
from sebp_edge.texts.formats import FORMATS
from sebp_edge.training.rates import ORDER, USUAL

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes", __file__)
# Beyond both ends of those that are tried.
SWEEP = (5e-5, *sorted(ORDER), 5e-3)
RESAMPLES = 10_000


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--notes", type=int, default=41)
    parser.add_argument("--characters", type=int, nargs=2, default=[200, 3000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="notes")
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    records = []
    for model in options.model:
        cases = []
        for folder, seed in product(options.folders, options.seeds):
            texts = notes(folder, options.notes, range(*options.characters), seed)
            about = {"model": Path(model).name, "texts": folder.name, "recipe": options.recipe, "seed": seed}
            cases.append({rate: about | adapt(model, options, rate, texts, seed) for rate in (*SWEEP, AUTO)})
            records += cases[-1].values()
            print(*about.values(), *(f"{rate}: {row['gain']:.2%}" for rate, row in cases[-1].items()), flush=True)
        print(summary(cases), flush=True)
    on_cpu = pick_device(options.device).type == "cpu"
    evidence.record("learning-rates-cpu" if on_cpu else "learning-rates", SOURCES, records, options.record, on_cpu)


def notes(folder: Path, number: int, characters: range, seed: int) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS and path.stat().st_size in characters)
    return random.Random(seed).sample(files, min(number, len(files)))


def adapt(model: str, options, rate: float | str, texts: list[Path], seed: int) -> dict:
    recipe = Recipe.load(options.recipe).replace(learning_rate=rate)
    with tempfile.TemporaryDirectory() as folder:
        store = AdapterStore(folder)
        result = Personalizer(model, recipe=recipe, device=options.device, seed=seed, store=store).adapt(texts)
    return {
        "stated": rate,
        "chosen": result.saved.record.recipe["learning_rate"],
        "tried": " ".join(f"{each.learning_rate:g}:{each.loss}" for each in result.rates.tried) if result.rates else "",
        "validation": min(result.report.training.curves[0].validation),
        "gain": result.gain,
        "at_least": result.gain_at_least,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 1),
    }


def summary(cases: list[dict]) -> str:
    """The mean gains, and what choosing gains as a share of what the sweep gains, with a 95 % interval over cases."""
    swept = [case[min(SWEEP, key=lambda rate: case[rate]["validation"])]["gain"] for case in cases]
    chosen, usual = ([case[rate]["gain"] for case in cases] for rate in (AUTO, USUAL))
    draw, shares = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = draw.choices(range(len(cases)), k=len(cases))
        shares.append(sum(chosen[each] for each in drawn) / sum(swept[each] for each in drawn))
    low, high = sorted(shares)[RESAMPLES // 40], sorted(shares)[-RESAMPLES // 40]
    return (
        f"gain: {mean(chosen):.2%} with the rate chosen, {mean(swept):.2%} with the sweep's, {mean(usual):.2%} with "
        f"{USUAL:g}; chosen / sweep {sum(chosen) / sum(swept):.3f} ({low:.3f} to {high:.3f}), {len(cases)} cases"
    )


if __name__ == "__main__":
    main()
