"""Shows where the time of `sebp-edge adapt` goes, from the command to the saved adapter.

    python kernels/bench/speed/end_to_end.py --notes FOLDER [--record [FILE]]     60 and 1000 notes of FOLDER, on a GPU
    python kernels/bench/speed/end_to_end.py --sizes 60                           60 of this project's own notes
    python kernels/bench/speed/end_to_end.py --cpu tiny FOLDER... [--record [FILE]]   on the CPU, with these models

On the GPU, the model has the shape of Llama-3.2-3B: a folder with random bf16 weights and the bundled model's tokenizer
is made once and stays in --work. The command trains for two epochs, in a process of its own, with empty caches (on the
CPU of all, on a GPU of Triton), and on a GPU again with those of the first run. The arrival times of its events split
the run:

    import      from the start of the process to the call of `adapt`: Python, libraries, recipe, device
    load        read the files, load the model     texts       tokenize the texts
    attach      adapter, trials of the kernels, gradients and moments
    capture     compile and capture all graphs, as the command reports them, those during training included
    steps       updates, without captures          evaluation  held-out losses and copies of the best state
    save        after the last evaluation: free graphs, write the adapter, which is active from now on
    exit        samples, general text, copies; report the result, end the process

The page cache is warm: the libraries were imported and the weights read or written before. Each row is a single run;
only the time between steps is a median.
"""

import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config, make_model
from sebp_edge.engine.models import loading
from sebp_edge.reading.formats import FORMATS

NOTES = evidence.ROOT / "examples" / "notes"
TINY_MODEL = Path(loading.__file__).with_name("tiny")
SIZES = (60, 1000)
# What the `sebp-edge` script does, whether or not it is on the path.
COMMAND = [sys.executable, "-c", "from sebp_edge.cli import main; main()", "adapt"]
NOT_BETTER = 3
# Enough for the median step and each evaluation; more would only add steps.
EPOCHS = "2"
SOURCES = (*evidence.OPS, "sebp_edge", "recipes/notes.toml", "kernels/bench/models.py", __file__)
# By event: the part that the time before it counts as, without the captures in that time.
PART_ENDED_BY = {
    "model_loaded": "load",
    "texts_read": "texts",
    "training_started": "attach",
    "step": "steps",
    "evaluated": "evaluation",
    "saved": "save",
    "result": "exit",
}
PARTS = ("import", *dict.fromkeys(PART_ENDED_BY.values()))
# Phases of the command that are a part of saving; the rest frees graphs and restores the model.
WITHIN_SAVE = ("samples", "general text", "copies", "saving")
PARTS = (*PARTS[: PARTS.index("steps")], "capture", *PARTS[PARTS.index("steps") :])

Arrivals = list[tuple[float, dict]]


class CommandFailed(RuntimeError):
    """A command ended with an error.

    Attributes:
        arrivals: its events until then.
    """

    def __init__(self, message: str, arrivals: Arrivals):
        super().__init__(message)
        self.arrivals = arrivals


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--notes", type=Path, default=NOTES, metavar="FOLDER")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="NOTES")
    default = Path(tempfile.gettempdir()) / "sebp-edge-end-to-end"
    parser.add_argument("--work", type=Path, default=default, metavar="FOLDER", help=f"by default {default}")
    parser.add_argument("--cpu", nargs="+", metavar="MODEL")
    options = parser.parse_args(arguments)
    files = text_files(options.notes)
    sizes = options.sizes or ((len(files),) if options.cpu else SIZES)
    if max(sizes) > len(files):
        parser.error(f"{options.notes} has {len(files)} text files, expected {max(sizes)}; give --notes or --sizes.")
    models = options.cpu or [ensure_model_folder(options.work / "llama-3.2-3b", known_config("llama-3.2-3b"))]
    device = "cpu" if options.cpu else "cuda"
    subprocess.run([sys.executable, "-c", "import sebp_edge.personalizer"], check=True)
    rows = []
    for model, size in itertools.product(models, sizes):
        for row in measure(size, files, model, options.work, device):
            rows.append(evidence.show({"model": Path(model).name} | row if options.cpu else row))
    name = "end-to-end-cpu" if options.cpu else "end-to-end"
    evidence.record(name, SOURCES, rows, options.record, on_cpu=bool(options.cpu))


def text_files(folder: Path) -> list[Path]:
    """The folder's files in known formats, in a random order that depends only on their names."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in FORMATS and path.is_file())
    return random.Random(0).sample(files, len(files))


def measure(size: int, files: list[Path], model: Path | str, work: Path, device: str) -> Iterator[dict]:
    """The figures of the run with an empty cache, then on a GPU of one with a filled one; parts in seconds."""
    shutil.rmtree(runs := work / "runs", ignore_errors=True)
    notes = runs / "notes"
    notes.mkdir(parents=True)
    for number, file in enumerate(files[:size]):
        shutil.copy(file, notes / f"{number:04}{file.suffix}")
    for cache in ("empty", "filled")[: 1 if device == "cpu" else 2]:
        options = [str(notes), "--model", str(model), "--json", "--device", device, "--epochs", EPOCHS, "--out"]
        caches = {"TRITON_CACHE_DIR": str(runs / "triton")}
        if device == "cpu":
            caches["XDG_CACHE_HOME"] = str(runs / "cache")
        begin, arrivals, end = run_timed([*COMMAND, *options, str(runs / cache)], caches)
        yield {"notes": size, "triton_cache": cache, **split(begin, arrivals, end), **figures(arrivals)}


def run_timed(command: list[str], environment: dict[str, str]) -> tuple[float, Arrivals, float]:
    """Runs a command; returns its start, its JSON lines with their arrival times, and its end.

    Raises:
        CommandFailed: the command failed; the message contains its standard error.
    """
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        arrivals = [(time.perf_counter(), json.loads(line)) for line in process.stdout]
        code, end = process.wait(), time.perf_counter()
        errors.seek(0)
        if code not in (0, NOT_BETTER):
            raise CommandFailed(f"The command failed with exit code {code}: {errors.read().strip()}", arrivals)
    return begin, arrivals, end


def split(begin: float, arrivals: Arrivals, end: float) -> dict[str, float]:
    """Seconds of each part; they add up to the whole run."""
    result_arrival, result = arrivals[-1]
    seconds = dict.fromkeys(PARTS, 0.0)
    # No event comes before the model is loaded, so the start of the call follows from its own duration.
    seconds["import"] = result_arrival - result["seconds"] - begin
    before, captured = result_arrival - result["seconds"], 0.0
    for arrival, event in arrivals:
        if event["event"] == "graph_captured":
            captured += event["seconds"]
        elif event["event"] in PART_ENDED_BY:
            seconds["capture"] += captured
            seconds[PART_ENDED_BY[event["event"]]] += arrival - before - captured
            before, captured = arrival, 0.0
    seconds["exit"] += end - before
    return seconds


def figures(arrivals: Arrivals) -> dict:
    """The amount of work in a run, and its result."""
    loaded = next(event for _, event in arrivals if event["event"] == "model_loaded")
    steps = [(arrival, event) for arrival, event in arrivals if event["event"] == "step"]
    result = arrivals[-1][1]
    return {
        "parameters": loaded["parameters"],
        "documents": result["documents"],
        "tokens": result["tokens"],
        "steps_done": len(steps),
        "tokens_trained": sum(last["tokens"] for last in {event["phase"]: event for _, event in steps}.values()),
        "median_step_ms": 1e3 * statistics.median(step_seconds(steps) or [math.nan]),
        "graphs": sum(event["event"] == "graph_captured" for _, event in arrivals),
        "evaluations": sum(event["event"] == "evaluated" for _, event in arrivals),
        "notices": " ".join(event["message"] for _, event in arrivals if event["event"] == "notice"),
        "passed": result["passed"],
        "loss_before": result["heldout_loss_before"],
        "loss_after": result["heldout_loss_after"],
        **{f"save: {phase}": result["phases"].get(phase, 0.0) for phase in WITHIN_SAVE},
        "peak_gib": (result["allocator_peak_bytes"] or result["peak_memory_bytes"]) / 2**30,
    }


def step_seconds(steps: Arrivals) -> list[float]:
    """Seconds between consecutive steps of the same epoch."""
    return [
        arrival - before
        for (before, last), (arrival, event) in itertools.pairwise(steps)
        if (event["phase"], event["epoch"]) == (last["phase"], last["epoch"])
    ]


def ensure_model_folder(folder: Path, config: PretrainedConfig) -> Path:
    """Makes the folder of a decoder of this shape if missing; in another process, so that its GPU memory is freed."""
    if not folder.exists():
        process = multiprocessing.get_context("spawn").Process(target=make_folder, args=(folder, config))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The model folder could not be made (exit code {process.exitcode}).")
    return folder


def make_folder(folder: Path, config: PretrainedConfig) -> None:
    """Writes random bf16 weights in safetensors shards and the bundled model's tokenizer, all or nothing."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    torch.manual_seed(0)
    model = make_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.save_pretrained(part, max_shard_size="2GB")
    for file in TINY_MODEL.glob("*token*.json"):
        shutil.copy(file, part)
    part.rename(folder)


if __name__ == "__main__":
    main()
