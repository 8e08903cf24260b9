"""Reads merged exports with the programs that they are for, and compares their loss with ours.

    python kernels/bench/merged_models.py ENVIRONMENTS [MODEL...] [--families] [--record [FILE]]

transformers 4.57 and mlx-lm run in environments of their own in the folder ENVIRONMENTS, which are made with pip if they
are not there. Each model gets a random LoRA adapter, and its merged folder is read on two texts of examples/notes.
--families adds small random models of each family, with each kind of rotary embeddings, whose settings are none of the
programs' defaults. The rows "before" have the config.json and tokenizer that transformers 5 writes by itself, without
the older names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import torch

import evidence
from export import write_adapter
from export_differences import FAMILIES, GEMMA, NOTES, SIZES, make_model
from sebp_edge import Recipe
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.events import silent
from sebp_edge.export.formats import Merged
from sebp_edge.export.mlx_lm import what_it_lacks
from sebp_edge.export.read_back import CPU, Comparison
from sebp_edge.export.settings import check_settings
from sebp_edge.export.source import Source
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model, without_progress_bars
from sebp_edge.texts.readers import read_texts

SOURCES = (
    *("sebp_edge/export", "sebp_edge/models", "kernels/bench/loss_elsewhere.py", "kernels/bench/export_differences.py"),
    __file__,
)
READER = evidence.ROOT / "kernels" / "bench" / "loss_elsewhere.py"
# Each environment's name, what pip installs into it, and the program as `loss_elsewhere` calls it.
PROGRAMS = {
    "transformers 4": (["torch", "transformers==4.57.*"], "transformers"),
    "mlx-lm": (["mlx[cpu]" if sys.platform == "linux" else "mlx", "mlx-lm"], "mlx_lm"),
}
LENGTH, NUM_ROWS, TEXT = 256, 2, "The ferry left at six.\nIt was naïve; 1,024 of us took it."
THETA, LOCAL = 300_000.0, 3_000.0
DEFAULT = SIZES["rope_parameters"]
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONG = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "long_factor": [1.0 + number for number in range(32)],
    "short_factor": [1.0 + number / 8 for number in range(32)],
    "original_max_position_embeddings": 512,
}
# More models of some families: the family, and what differs from `SIZES`.
CASES = {family: (family, changes) for family, changes in FAMILIES.items()} | {
    "llama, untied": ("llama", {"tie_word_embeddings": False, "head_dim": 32}),
    "llama, Llama 3's scaling": (
        "llama",
        {"rope_parameters": LLAMA_3 | {"rope_theta": THETA, "original_max_position_embeddings": 64}},
    ),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": THETA}}),
    "mistral, window of 64": ("mistral", {"sliding_window": 64}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma3_text, linear": (
        "gemma3_text",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_theta": LOCAL, "rope_type": "default"},
            }
        },
    ),
    "phi3, half rotated": ("phi3", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 512}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--families", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args()
    programs = {"transformers 5": (Path(sys.executable), "transformers")}
    for name, (packages, program) in PROGRAMS.items():
        programs[name] = make_environment(options.environments / name.replace(" ", "-"), packages), program
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            rows += losses(model, Path(model).name, 0.003, programs)
        for number, (name, (family, changes)) in enumerate(CASES.items() if options.families else ()):
            rows += losses(make_model(Path(folder) / str(number), family, changes), name, 0.05, programs)
    if options.record:
        evidence.record("merged-models", SOURCES, rows, options.record, on_cpu=True)


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Returns the interpreter of an environment with these packages, which is made unless it is there."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def losses(model: str | Path, name: str, spread: float, programs: dict[str, tuple[Path, str]]) -> Iterator[dict]:
    """Yields a row for each program that reads the merged model, with the older names and without them.

    Args:
        spread: the standard deviation of the random adapter's lora_B.
        programs: the interpreter of each program, and what `loss_elsewhere` calls it.
    """
    reference = resolve(model)
    with tempfile.TemporaryDirectory() as temporary:
        adapter, folder = Path(temporary) / "adapter", Path(temporary) / "merged"
        write_adapter(adapter, load_base_model(reference, Recipe.load("notes"), CPU), spread)
        source = Source.open("adapter", adapter, AdapterRecord.read(adapter), reference)
        comparison = Comparison(source, read_texts(NOTES), silent, lambda: None)
        longest = sorted((example.input_ids for example in comparison.texts.examples), key=len)[-NUM_ROWS:]
        comparison.texts.rows[:] = rows = [list(ids[:LENGTH]) for ids in longest]
        dtype = source.weights.dtype
        expected, _ = comparison.with_weights(lambda key: source.weights.read(key).to(dtype))
        ours = mean_loss(expected, rows)
        folder.mkdir()
        Merged(source).write(folder, lambda *_: None, lambda: None)
        check_settings(folder, source)
        lacks = any(what_it_lacks(source.config))
        tokens = source.tokenizer(TEXT)["input_ids"]
        about = {"model": name, "tokens": sum(map(len, rows)), "ours": ours}
        for when in ("after", "before"):
            if when == "before":
                write_as_before(folder, source)
            for program, (python, called) in programs.items():
                found = ask(python, called, folder, rows)
                row = about | {"when": when, "program": program, "version": found["version"], "loss": found["loss"]}
                row |= {"same_tokens": found["tokens"] == tokens, "lacks": lacks and program == "mlx-lm"}
                print(*(f"{each:.5f}" if isinstance(each, float) else each for each in row.values()), flush=True)
                yield row


def mean_loss(log_probabilities: list[torch.Tensor], rows: list[list[int]]) -> float:
    """Returns the mean loss of all tokens but the rows' first, in nats."""
    chosen = [
        values[:-1].gather(1, torch.tensor(row[1:])[:, None])
        for values, row in zip(log_probabilities, rows, strict=True)
    ]
    return -torch.cat(chosen).double().mean().item()


def write_as_before(folder: Path, source: Source) -> None:
    """Writes config.json and the tokenizer as transformers 5 does by itself."""
    for file in folder.glob("*token*"):
        file.unlink()
    config = json.loads(source.config.to_json_string(use_diff=False))
    config |= {
        "dtype": str(source.weights.dtype).removeprefix("torch."),
        "architectures": [type(source.model).__name__],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with without_progress_bars():
        source.tokenizer.save_pretrained(folder)


def ask(python: Path, program: str, folder: Path, rows: list[list[int]]) -> dict:
    """Returns what `loss_elsewhere` prints in another interpreter, without the network."""
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, READER, program, folder],
        input=json.dumps({"rows": rows, "text": TEXT}),
        capture_output=True,
        text=True,
        env=quiet,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
