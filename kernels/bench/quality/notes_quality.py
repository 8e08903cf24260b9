"""Measures what an adaptation to real notes gains and costs: the gate's losses, general loss, copying, time.

    python kernels/bench/quality/notes_quality.py FOLDER... [--model tiny ...] [--notes 200] [--seeds 0 1 2]
                                                    [--recipe notes] [--device cpu] [--4bit] [--record [FILE]]

The seed draws --notes notes from each folder; it also sets the splits, the shuffling and the initial weights. --4bit
measures each with a base model in full precision and in 4 bits: both see the same documents in the same order, and each
adapter is evaluated on the base model that it was trained on.
"""

import random
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import AdapterStore, AdaptResult, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.reading.formats import FORMATS

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/engine/models/tiny/model.safetensors", "recipes/notes.toml", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--notes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", nargs="+", default=["notes"])
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--device")
    parser.add_argument("--4bit", action="store_true", dest="four_bit")
    options = parser.parse_args(arguments)
    records = []
    bases = {"full precision": {}} | ({"4 bits": {"load_in_4bit": True}} if options.four_bit else {})
    cases = product(options.model, options.recipe, options.folders, bases, options.seeds)
    for model, recipe_name, folder, base, seed in cases:
        recipe = Recipe.load(recipe_name).replace(**bases[base])
        found = losses(adapt(model, recipe, notes(folder, options.notes, seed), options.device, seed))
        about = {"model": Path(model).name, "texts": folder.name, "recipe": recipe.name, "base": base, "seed": seed}
        records.append(evidence.show(about | found))
    on_cpu = pick_device(options.device).type == "cpu"
    name = "four-bit-quality" if options.four_bit else "notes-quality"
    evidence.record(name, SOURCES, records, options.record, on_cpu)


def notes(folder: Path, number: int, seed: int) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS)
    return random.Random(seed).sample(files, min(number, len(files)))


def losses(result: AdaptResult) -> dict:
    """The gate's losses and the gain as a share of the loss before; what it cost."""
    return {
        "documents": result.documents,
        "before": result.heldout_loss_before,
        "after": result.heldout_loss_after,
        "gain": result.gain,
        "at_least": result.gain_at_least,
        "verdict": result.verdict,
        "refit_validation": result.refit_loss,
        "general_before": result.general_loss_before,
        "general_after": result.general_loss_after,
        "copied_tokens": max((copy.run for copy in result.copies), default=0),
        "seconds": round(result.seconds, 1),
    }


def adapt(model: str, recipe: Recipe, texts: list[Path], device: str | None, seed: int) -> AdaptResult:
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(model, recipe=recipe, device=device, seed=seed, store=AdapterStore(store))
        return personalizer.adapt(texts)


if __name__ == "__main__":
    main()
