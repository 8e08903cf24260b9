"""Measures how much the bundled model learns from real notes: the judge's loss before and after, over seeds.

    python kernels/bench/notes_quality.py FOLDER... [--notes 200] [--seeds 0 1 2] [--recipe notes] [--device cpu]

The seed draws --notes notes from each folder; it also sets the splits, the shuffling and the initial weights.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.texts.formats import FORMATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--notes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", nargs="+", default=["notes"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = []
    print(
        f"{'recipe':20}{'notes':>14}{'seed':>6}{'tokens':>9}{'before':>9}{'after':>9}{'fall':>8}{'SE':>8}{'seconds':>9}"
    )
    for recipe in map(Recipe.load, options.recipe):
        for folder in options.folders:
            for seed in options.seeds:
                result = adapt(options, recipe, folder, seed)
                before, after = result.heldout_loss_before, result.heldout_loss_after
                print(
                    f"{recipe.name:20}{folder.name:>14}{seed:>6}{result.tokens:>9,}{before:>9.3f}{after:>9.3f}"
                    f"{1 - after / before:>8.1%}{result.standard_error / before:>8.1%}{result.seconds:>9.1f}",
                    flush=True,
                )
                records.append({"recipe": recipe.name, "notes": folder.name, "seed": seed, **result.to_dict()})
    if options.json:
        kept = [{key: value for key, value in record.items() if key != "left_out"} for record in records]
        options.json.write_text(json.dumps(kept, indent=2, default=str) + "\n")


def adapt(options: argparse.Namespace, recipe: Recipe, folder: Path, seed: int):
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS)
    chosen = random.Random(seed).sample(files, min(options.notes, len(files)))
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            options.model, recipe=recipe, device=options.device, seed=seed, store=AdapterStore(store)
        )
        return personalizer.adapt(chosen)


if __name__ == "__main__":
    main()
