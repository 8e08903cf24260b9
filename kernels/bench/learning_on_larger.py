"""Measures what learning on saves with models larger than the bundled one, as learning_on.py does.

    python kernels/bench/learning_on_larger.py --model FOLDER... [--notes 60] [--seeds 0] [--device cpu]
                                               [--record [FILE]]
    python kernels/bench/learning_on_larger.py --shape llama-3.2-3b... [--work FOLDER] [--record [FILE]]

A shape is a known model's, with random weights in bf16 and the bundled model's tokenizer; its folder is made once and
stays in --work. Each model has a result of its own, since each may be measured on another machine.
"""

import argparse
import tempfile
from pathlib import Path

import evidence
import learning_on
from end_to_end import ensure_model_folder
from models import known_config
from sebp_edge.machine.devices import pick_device

SOURCES = (
    *evidence.STEP,
    "sebp_edge",
    "recipes/notes.toml",
    *(f"kernels/bench/{file}.py" for file in ("learning_on", "end_to_end", "models")),
    __file__,
)
# The names of the results begin with it, and end with the model's.
RESULT = "learning-on-"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model", type=Path, nargs="+", default=[], metavar="FOLDER")
    chosen.add_argument("--shape", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--notes", type=int, default=60, choices=learning_on.CHANGES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    default = Path(tempfile.gettempdir()) / "sebp-edge-shapes"
    parser.add_argument("--work", type=Path, default=default, metavar="FOLDER", help=f"by default {default}")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    folders = [
        *options.model,
        *(ensure_model_folder(options.work / name, known_config(name)) for name in options.shape),
    ]
    for folder in folders:
        rows = [row for seed in options.seeds for row in measure(folder, options.notes, seed, options.device)]
        if options.record:
            on_cpu = pick_device(options.device).type == "cpu"
            evidence.record(RESULT + folder.name, SOURCES, rows, options.record, on_cpu)


def measure(folder: Path, notes: int, seed: int, device: str | None) -> list[dict]:
    """One row for each arm."""
    found = learning_on.measure(notes, seed, str(folder), device)
    return [{"model": folder.name} | row for row in found]


if __name__ == "__main__":
    main()
