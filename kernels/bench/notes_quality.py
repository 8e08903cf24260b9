"""Measures how much the bundled model learns from real notes: the test loss before and after, over seeds.

    python kernels/bench/notes_quality.py FOLDER... [--notes 200] [--seeds 0 1 2] [--recipe notes] [--device cpu]
                                                    [--record [FILE]]

The seed draws --notes notes from each folder; it also sets the splits, the shuffling and the initial weights.
"""

import argparse
import random
import tempfile
from pathlib import Path

import evidence
from sebp_edge import AdapterStore, AdaptResult, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.texts.formats import FORMATS

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes/notes.toml", __file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--notes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", nargs="+", default=["notes"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args()
    records = []
    print(
        f"{'recipe':20}{'notes':>14}{'seed':>6}{'tokens':>9}{'before':>9}{'after':>9}{'fall':>8}{'SE':>8}{'seconds':>9}"
    )
    for recipe in map(Recipe.load, options.recipe):
        for folder in options.folders:
            for seed in options.seeds:
                result = adapt(options, recipe, folder, seed)
                found = losses(result)
                print(
                    f"{recipe.name:20}{folder.name:>14}{seed:>6}{result.tokens:>9,}{found['before']:>9.3f}"
                    f"{found['after']:>9.3f}{found['fall']:>8.1%}{found['standard_error']:>8.1%}{result.seconds:>9.1f}",
                    flush=True,
                )
                records.append({"texts": folder.name, "recipe": recipe.name, "seed": seed, **found})
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        evidence.record("notes-quality", SOURCES, records, options.record, on_cpu)


def losses(result: AdaptResult) -> dict[str, float]:
    """The test loss before and after; its fall and the standard error of that, as shares of the loss before."""
    before, after = result.heldout_loss_before, result.heldout_loss_after
    fall = {"fall": 1 - after / before, "standard_error": result.standard_error / before}
    return {"before": before, "after": after, **fall}


def adapt(options: argparse.Namespace, recipe: Recipe, folder: Path, seed: int) -> AdaptResult:
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS)
    chosen = random.Random(seed).sample(files, min(options.notes, len(files)))
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            options.model, recipe=recipe, device=options.device, seed=seed, store=AdapterStore(store)
        )
        return personalizer.adapt(chosen)


if __name__ == "__main__":
    main()
