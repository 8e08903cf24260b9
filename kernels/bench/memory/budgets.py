"""Compares the GPU memory that `sebp-edge adapt --memory` takes with what its plan predicted.

    python kernels/bench/memory/budgets.py [--record [FILE]]              Llamas from 135M to 8B, on a GPU
    python kernels/bench/memory/budgets.py --families [--record [FILE]]   nine other families, on a GPU
    python kernels/bench/memory/budgets.py --tiny                         the bundled model on the CPU, to try it

`--only` takes the names of runs or shapes, recorded as a table of their own; `--gpus 2` runs two side by side.

Each run is the command in a process of its own, with random bf16 weights of the true shape, a context of 4096 and 4096
loss tokens a step. Texts have the token lengths of real ones (lengths.json): paragraphs of notes, or OASST1's
conversations as the long case. The peak is what the process uses on the GPU, CUDA's context and libraries included;
the allocator's peak is what torch counts and what peers quote. Runs that cannot fit must fail before the first step.
For a run that fails later, the figures are those of its dry run.
"""

import json
import queue
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import LENGTHS, known_config
from speed.end_to_end import COMMAND, TINY_MODEL, CommandFailed, ensure_model_folder, figures, run_timed

NOTES, CHATS = "notes, paragraphs", "OASST1"
CONTEXT = BATCH_TOKENS = 4096
# Enough tokens for twelve steps after some texts are held out.
TOKENS = 14 * BATCH_TOKENS


class Run(NamedTuple):
    """One run: a shape, how it is trained, its memory budget, and the data set whose text lengths it uses."""

    name: str
    shape: str
    method: str
    load_in_4bit: bool
    budget: str
    data: str

    def recipe(self) -> str:
        values = f'method = "{self.method}"\nload_in_4bit = {str(self.load_in_4bit).lower()}\nepochs = 1\n'
        return values + f"context_length = {CONTEXT}\nbatch_tokens = {BATCH_TOKENS}\n"


RUNS = [
    Run("3b-lora-unlimited", "llama-3.2-3b", "lora", False, "70GB", NOTES),
    Run("3b-lora-8gb", "llama-3.2-3b", "lora", False, "8GB", NOTES),
    Run("3b-lora-long-10gb", "llama-3.2-3b", "lora", False, "10GB", CHATS),
    Run("3b-4bit-3.7gb", "llama-3.2-3b", "lora", True, "3.7GB", NOTES),
    Run("3b-4bit-long-5gb", "llama-3.2-3b", "lora", True, "5GB", CHATS),
    Run("3b-full-16gb", "llama-3.2-3b", "full", False, "16GB", NOTES),
    Run("135m-lora-2gb", "smollm2-135m", "lora", False, "2GB", NOTES),
    Run("360m-full-4gb", "smollm2-360m", "full", False, "4GB", CHATS),
    Run("1b-lora-4gb", "llama-3.2-1b", "lora", False, "4GB", CHATS),
    Run("8b-lora-20gb", "llama-3.1-8b", "lora", False, "20GB", CHATS),
    Run("8b-4bit-8gb", "llama-3.1-8b", "lora", True, "8GB", NOTES),
    Run("3b-lora-6gb", "llama-3.2-3b", "lora", False, "6GB", NOTES),
    Run("3b-4bit-2.6gb", "llama-3.2-3b", "lora", True, "2.6GB", NOTES),
    Run("8b-4bit-4gb", "llama-3.1-8b", "lora", True, "4GB", NOTES),
    Run("8b-lora-10gb", "llama-3.1-8b", "lora", False, "10GB", NOTES),
]
# For LoRA with plenty of memory, LoRA with little, 4 bits, and full training.
BUDGETS = {
    "phi-3-mini": ("100GB", "10GB", "5GB", "100GB"),
    "olmo-2-1b": ("100GB", "5GB", "3.2GB", "12GB"),
    "gemma-3-1b": ("100GB", "4GB", "2.8GB", "8GB"),
    "qwen3-0.6b": ("100GB", "3GB", "2.2GB", "100GB"),
    "starcoder2-3b": ("100GB", "9GB", "4.5GB", "20GB"),
    "glm-edge-1.5b": ("100GB", "5.5GB", "3GB", "100GB"),
    "lfm2-1.2b": ("100GB", "6GB", "3.5GB", "8GB"),
    "qwen3.5-0.8b": ("100GB", "5GB", "3.5GB", "12GB"),
    "gemma-4-e2b": ("100GB", "9GB", "6GB", "100GB"),
}
METHODS = {"lora": ("lora", False), "lora-tight": ("lora", False), "4bit": ("lora", True), "full": ("full", False)}
FAMILY_RUNS = [
    Run(f"{shape}-{method_name}", shape, *method, budget, NOTES)
    for shape, budgets in BUDGETS.items()
    for (method_name, method), budget in zip(METHODS.items(), budgets, strict=True)
]
TINY = [Run("tiny", "tiny", "lora", False, "3GB", NOTES), Run("tiny-too-small", "tiny", "lora", False, "100MB", NOTES)]
# The command line and the stores are left out, since they use no GPU memory.
SOURCES = (
    *evidence.STEP,
    *(
        f"sebp_edge/{part}"
        for part in ("machine", "engine/models", "lessons", "values", "personalizer.py", "recipe.py")
    ),
    *(f"kernels/bench/{file}" for file in ("lengths.json", "models.py", "shapes.toml", "speed/end_to_end.py")),
    __file__,
)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    default = Path(tempfile.gettempdir()) / "sebp-edge-memory"
    parser.add_argument("--work", type=Path, default=default, metavar="FOLDER", help=f"by default {default}")
    parser.add_argument("--gpus", type=int, default=1, metavar="NUMBER", help="GPUs that take one run each at a time")
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--families", action="store_true")
    table.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    runs = FAMILY_RUNS if options.families else TINY if options.tiny else RUNS
    names = {name for run in runs for name in (run.name, run.shape)}
    if unknown := set(options.only or ()) - names:
        parser.error(f"unknown runs or shapes: {', '.join(sorted(unknown))}; known are {', '.join(sorted(names))}.")
    if options.record and options.tiny:
        parser.error("--record is for runs on a GPU; leave out --record or --tiny.")
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = [run for run in runs if not options.only or {run.name, run.shape} & set(options.only)]
    rows = [evidence.show(row) for row in measure_all(chosen, options.work, options.gpus, on_cpu=options.tiny)]
    # Some runs do not replace a table of all.
    name = ("memory", *["families"] * options.families, *["some"] * bool(options.only))
    evidence.record("-".join(name), SOURCES, rows, options.record)


def measure_all(runs: list[Run], work: Path, gpus: int, *, on_cpu: bool) -> Iterator[dict]:
    """The figures of each run, in order, as soon as they are known; with several GPUs, each run has one to itself."""
    free = queue.SimpleQueue()
    for number in range(gpus):
        free.put({"CUDA_VISIBLE_DEVICES": str(number)} if gpus > 1 else {})

    def measure_on_free_gpu(run: Run) -> dict:
        gpu = free.get()
        try:
            return measure(run, work, on_cpu=on_cpu, environment=gpu)
        finally:
            free.put(gpu)

    for shape in {run.shape for run in runs} if not on_cpu else ():
        ensure_model_folder(work / shape, known_config(shape))
    with ThreadPoolExecutor(gpus) as pool:
        yield from pool.map(measure_on_free_gpu, runs)


def measure(run: Run, work: Path, *, on_cpu: bool, environment: dict[str, str] | None = None) -> dict:
    """The figures that the command reports for one run, or its error message if it failed."""
    model = TINY_MODEL if on_cpu else ensure_model_folder(work / run.shape, known_config(run.shape))
    row = run._asdict() | {"failed": ""}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        recipe, texts = Path(folder, "recipe.toml"), Path(folder, "texts.jsonl")
        recipe.write_text(run.recipe())
        tokens, longest = (2000, 60) if on_cpu else (TOKENS, CONTEXT)
        write_texts(texts, draw_lengths(run.data, tokens, longest), AutoTokenizer.from_pretrained(model))
        options = {"--model": model, "--recipe": recipe, "--memory": run.budget, "--out": Path(folder, "out")}
        options["--device"] = "cpu" if on_cpu else "cuda"
        command = [*COMMAND, str(texts), "--json", *(str(word) for option in options.items() for word in option)]
        try:
            _, arrivals, _ = run_timed(command, {"TRITON_CACHE_DIR": str(work / "triton"), **(environment or {})})
        except CommandFailed as error:
            return row | {"failed": str(error)} | dry_run_figures([event for _, event in error.arrivals])
    events, done = [event for _, event in arrivals], figures(arrivals)
    return row | {
        "parameters": done["parameters"],
        **planned(events),
        "peak_gb": events[-1]["peak_memory_bytes"] / 1e9,
        "allocator_gb": (events[-1]["allocator_peak_bytes"] or 0) / 1e9,
        "tokens_per_second": 1e3 * done["tokens_trained"] / done["steps_done"] / done["median_step_ms"],
        "num_cuts": sum(event["event"] in ("memory_ran_out", "memory_pressure") for event in events),
        "notices": done["notices"],
    }


def planned(events: list[dict]) -> dict:
    """The plan's prediction."""
    plan = next(event for event in events if event["event"] == "memory_planned")
    return {
        "predicted_gb": plan["peak"] / 1e9,
        "plan": json.dumps({key: value for key, value in plan.items() if key not in ("event", "footprint")}),
        "parts_gb": json.dumps({name: round(size / 1e9, 3) for name, size in plan["footprint"].items()}),
    }


def dry_run_figures(events: list[dict]) -> dict:
    """Plan and peak of a failed run, if it got as far as its dry run."""
    probed = [event for event in events if event["event"] == "memory_probed"]
    if not probed:
        return {}
    return planned(events) | {"peak_gb": probed[-1]["peak"] / 1e9, "allocator_gb": probed[-1]["allocator_peak"] / 1e9}


def draw_lengths(data: str, tokens: int, longest: int) -> list[int]:
    """Draws lengths from a data set's distribution until they add up to `tokens`; each is cut to `longest`."""
    counts = json.loads(LENGTHS.read_text())[data]["counts"]
    draw, lengths = random.Random(0), []
    while sum(lengths) < tokens:
        (length,) = draw.choices(range(len(counts)), counts)
        lengths.append(max(2, min(length, longest)))
    return lengths


def write_texts(file: Path, lengths: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes one text per line, of random single-token words, so that it has the given length with BOS and EOS.

    Raises:
        RuntimeError: a text has another length.
    """
    draw = random.Random(1)
    spelt = sorted(
        word[1:] for word in tokenizer.get_vocab() if word[0] == "Ġ" and word[1:].isalpha() and len(word) > 4
    )
    # A word in the vocabulary may still be split, so each is tokenized, both at the start of a text and inside it.
    at_start, inside = (
        tokenizer([form + word for word in spelt], add_special_tokens=False)["input_ids"] for form in ("", " ")
    )
    words = [word for word, one, other in zip(spelt, at_start, inside, strict=True) if len(one) == len(other) == 1]
    with file.open("w") as lines:
        for length in lengths:
            text = " ".join(draw.choices(words, k=max(1, length - 2)))
            found = len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 2
            if found != max(3, length):
                raise RuntimeError(f"A text has {found} tokens instead of {length}.")
            lines.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
