"""Times training steps on a base model from a GGUF file beside the same weights from a safetensors folder, on the CPU.

    python kernels/bench/gguf_training.py FILE.gguf [--rounds 10] [--threads 1] [--record [FILE]]

The folder is written from the file, in the dtype of the training. Steps of both alternate, with LoRA and hoisted rows,
on the four short texts of `sebp-edge bench`, so that the ratio also holds on a busy machine.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

import evidence
from sebp_edge.insight.bench.run import BATCH_SIZE
from sebp_edge.insight.bench.timer import running, time_steps
from sebp_edge.insight.bench.variants import HOISTED
from sebp_edge.insight.bench.workload import Workload, built_in_examples
from sebp_edge.models.adaptation import attach
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model, without_progress_bars
from sebp_edge.recipe import Recipe

SOURCES = (*evidence.STEP, "sebp_edge/gguf", "sebp_edge/insight/bench", "sebp_edge/models", __file__)
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options.file, options.rounds)
    for row in rows:
        print(f"{row['base']:12}{row['step_ms']:>9.1f} ms, loss {row['loss']:.6f}", flush=True)
    if options.record:
        evidence.record("gguf-training", SOURCES, rows, options.record, on_cpu=True)


def measure(file: Path, rounds: int) -> list[dict]:
    """Returns the median time of a step on each base, and the loss of its first step."""
    recipe = Recipe.load("notes")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = load_base_model(resolve(file), recipe, CPU)
        with without_progress_bars():
            base.model.save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)
        bases = {"GGUF": base, "safetensors": load_base_model(resolve(Path(folder)), recipe, CPU)}
        vocabulary = base.model.config.vocab_size
        batch = Workload.of(built_in_examples(BATCH_SIZE), recipe.context_length, vocabulary, CPU).batch
        steps, losses = {}, {}
        for name, each in bases.items():
            steps[name] = stack.enter_context(running(attach(each, recipe, seed=0).model, batch, HOISTED))
            losses[name] = steps[name].gradients().item()
            steps[name].zero_grad()
        times = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, step in steps.items():
                found = time_steps(step, CPU, warm_ups=0, repeats=1)
                times[name] += [each.step for each in found] if number else []  # the first step has costs of its own
        return [
            {
                "model": file.stem,
                "base": name,
                "tokens": int(batch.attention_mask.sum()),
                "loss": losses[name],
                "step_ms": 1000 * median(times[name]),
                "fastest_ms": 1000 * min(times[name]),
            }
            for name in steps
        ]


if __name__ == "__main__":
    main()
