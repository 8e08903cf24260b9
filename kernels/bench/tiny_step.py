"""Dense against SEBP for one training step of the bundled model, on batches of real notes padded to 80 to 90 %.

    python kernels/bench/tiny_step.py [--notes FOLDER] [--json FILE]

Prints a table of medians and their ratios to the dense, padded step; all ways run in turns in one process.
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from sebp_edge.insight.bench import time_steps
from sebp_edge.models.adaptation import attach
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import encode
from sebp_edge.texts.readers import read_texts

BATCH_SIZE = 4
NUM_BATCHES = 3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--notes", type=Path, default=Path(__file__).parents[2] / "examples" / "notes")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    records = []
    for method in ("lora", "full"):
        recipe = Recipe.load("notes").replace(method=method)
        base = load_base_model(resolve("tiny"), recipe, torch.device("cpu"))
        batches, padding = short_batches(base, options.notes, recipe.context_length)
        adaptation = attach(base, recipe, seed=0)
        timings = time_steps(adaptation.model, batches, tolerance=1e-3)
        dense = timings[0]
        print(f"\n{method}: {NUM_BATCHES} batches of {BATCH_SIZE} x {recipe.context_length}, {padding:.0%} padding")
        print(f"{'':15}{'forward':>10}{'backward':>10}{'step':>10}{'backward':>12}{'step':>8}{'gradient error':>16}")
        for timing in timings:
            times = (timing.forward, timing.backward, timing.step)
            print(
                f"{timing.way:15}"
                + "".join(f"{1e3 * seconds:>7.0f} ms" for seconds in times)
                + f"{dense.backward / timing.backward:>11.2f}x{dense.step / timing.step:>7.2f}x"
                + f"{timing.gradient_error:>16.1e}"
            )
            records.append({"method": method, "padding_share": padding, **asdict(timing)})
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.json.write_text(json.dumps({**machine, **versions, "timings": records}, indent=2) + "\n")


def short_batches(base, notes: Path, context_length: int):
    """Batches of the shorter notes, and their share of padding."""
    examples, _ = encode(read_texts(notes).documents, base.tokenizer, context_length)
    examples.sort(key=lambda example: len(example.input_ids))
    chosen = examples[: BATCH_SIZE * NUM_BATCHES * 2 : 2]
    collate = Collator(context_length, base.pad_token_id)
    batches = [collate(chosen[begin::NUM_BATCHES]) for begin in range(NUM_BATCHES)]
    real = sum(len(example.input_ids) for example in chosen)
    return batches, 1 - real / (len(chosen) * context_length)


if __name__ == "__main__":
    main()
