"""Measures what learning rates and numbers of epochs gain on notes, beside each other.

    python kernels/bench/quality/rates.py FOLDER... [--model tiny ...] [--settings 3e-4:2 1e-3:2 ...]
                                          [--notes 40] [--seeds 0 1 2] [--device cpu] [--record [FILE]]

A setting is RATE:EPOCHS. The seed draws --notes notes from each folder (one
author each); it also sets the splits, the shuffling and the initial weights. One split tests a training: folds change
the bound, not the gain, and cost six times the steps. Rows are recorded as they come. At the end, each setting is
compared on the cases that have all of them: the mean gain, its share of the gain of the best setting of each case
(which is chosen by the test itself, so that no rule can reach 100 %), the adapters kept, and the steps.
"""

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality.notes_quality import notes
from sebp_edge import Personalizer, Recipe
from sebp_edge.events import Event, StepDone
from sebp_edge.machine.devices import pick_device
from sebp_edge.run import preparation

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/engine/models/tiny/model.safetensors", "recipes/notes.toml", __file__)
OWN = Recipe.load("notes")
SETTINGS = ["2e-4:2", "3e-4:2", "5e-4:2", "1e-3:2"]


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--notes", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    preparation.MOST_IN_FOLDS = 0
    records = []
    for model in options.model:
        steps: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as store:
            personalizer = Personalizer(model, device=options.device, store=store, on_event=_counting(steps))
            for seed, folder, setting in product(options.seeds, options.folders, options.settings):
                personalizer.recipe, personalizer.seed = recipe_of(setting), seed
                steps.clear()
                result = personalizer.adapt(notes(folder, options.notes, seed), name=f"case-{len(records)}")
                about = {"model": Path(model).name, "texts": folder.name, "seed": seed, "setting": setting}
                records.append(evidence.show(about | figures(result) | {"steps": steps.total()}))
                evidence.record("rates", SOURCES, records, options.record, pick_device(options.device).type == "cpu")
    for row in compare(records):
        print(" ".join(f"{key} {value}" for key, value in row.items()))


def recipe_of(setting: str) -> Recipe:
    """The recipe "notes" with the rate and the epochs of a setting."""
    rate, epochs = setting.split(":")
    return OWN.replace(learning_rate=float(rate), epochs=int(epochs))


def figures(result) -> dict:
    first, words = result.curves[0], result.record.words
    return {
        "tokens": result.tokens,
        "chosen": result.record.recipe["learning_rate"],
        "best_epoch": first.best_epoch,
        "after_an_epoch": first.validation[1] if len(first.validation) > 1 else None,
        "validation": min(first.validation, default=None),
        "gain": result.gain,
        "at_least": result.gain_at_least,
        "verdict": result.verdict,
        "saved_before": words and words.saved_before / words.keystrokes,
        "saved_after": words and words.saved_after / words.keystrokes,
        "saved_more_lowest": words and words.saved_more_lowest,
        "saved_more_highest": words and words.saved_more_highest,
        "general_before": result.general_loss_before,
        "general_after": result.general_loss_after,
        "seconds": round(result.seconds, 1),
    }


def compare(records: Iterable[dict]) -> list[dict]:
    """The settings beside each other, on the cases that have all of them."""
    cases: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in records:
        cases[row["model"], row["texts"], row["seed"]][row["setting"]] = row
    settings = list(dict.fromkeys(row["setting"] for row in records))
    whole = [case for case in cases.values() if len(case) == len(settings)]
    best = sum(max(row["gain"] or 0 for row in case.values()) for case in whole)
    return [
        {
            "setting": setting,
            "cases": len(whole),
            "gain": round(fmean(case[setting]["gain"] or 0 for case in whole), 4),
            "of_best": round(sum(case[setting]["gain"] or 0 for case in whole) / best, 4),
            "kept": sum(case[setting]["verdict"] == "better" for case in whole),
            "steps": sum(case[setting]["steps"] for case in whole),
        }
        for setting in settings
        if whole
    ]


def _counting(steps: Counter[str]):
    def sink(event: Event) -> None:
        if isinstance(event, StepDone):
            steps[event.phase] += 1

    return sink


if __name__ == "__main__":
    main()
