"""Measures what a 4-bit base model costs in quality: the test loss on notes, in full precision and in 4 bits.

    python kernels/bench/quality/four_bit_quality.py [FOLDER] [--model tiny] [--seeds 0 1 2] [--recipe notes]
                                             [--device cpu] [--record [FILE]]

Both precisions see the same documents in the same order; each adapter is evaluated on the base model it was
trained on.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from quality.notes_quality import SOURCES, losses
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device

EXAMPLES = evidence.ROOT / "examples" / "notes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=EXAMPLES)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="notes")
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args()
    records = []
    print(f"{'base':16}{'seed':>6}{'before':>9}{'after':>9}{'fall':>8}{'at least':>10}{'seconds':>9}")
    for in_4bit in (False, True):
        base, of_base = "4 bits" if in_4bit else "full precision", []
        for seed in options.seeds:
            result = adapt(options, Recipe.load(options.recipe).replace(load_in_4bit=in_4bit), seed)
            found = losses(result)
            of_base.append((found["before"], found["after"]))
            print(
                f"{base:16}{seed:>6}{figures(*of_base[-1])}{found['at_least']:>10.1%}{result.seconds:>9.1f}",
                flush=True,
            )
            records.append({"base": base, "seed": seed, **found})
        print(f"{base:16}{'mean':>6}{figures(*map(mean, zip(*of_base, strict=True)))}")
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        evidence.record("four-bit-quality", (*SOURCES, __file__), records, options.record, on_cpu)


def figures(before: float, after: float) -> str:
    return f"{before:>9.3f}{after:>9.3f}{1 - after / before:>8.1%}"


def adapt(options: argparse.Namespace, recipe: Recipe, seed: int):
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            options.model, recipe=recipe, device=options.device, seed=seed, store=AdapterStore(store)
        )
        return personalizer.adapt(options.folder)


if __name__ == "__main__":
    main()
