"""Times a training step of the bundled model on the CPU, on one thread, in all variants of `sebp-edge bench`.

    python kernels/bench/speed/cpu_steps.py [--record [FILE]]

LoRA and all weights, with the benchmark's own four short texts, padded to 512.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.research.bench.run import run_bench

SOURCES = (*evidence.STEP, "sebp_edge/research/bench", "sebp_edge/models", __file__)
RECIPES = ("notes", "full")


def main() -> None:
    options = evidence.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = [row for recipe in RECIPES for row in steps(recipe)]
    evidence.record("cpu-steps", SOURCES, rows, options.record, on_cpu=True)


def steps(recipe: str) -> list[dict]:
    """One row per variant that runs on a CPU."""
    found = run_bench("tiny", recipe=recipe, device="cpu")
    about = {"trained": found.method, "padding_share": found.padding_share, "tokens": found.tokens}
    return [evidence.show(about | row) for row in found.rows() if row["step_ms"]]


if __name__ == "__main__":
    main()
