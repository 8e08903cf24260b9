"""Times how GGUF files are read on the CPU: seconds for a billion weights of each type, and the load of whole files.

    python kernels/bench/gguf_loading.py [FILE.gguf...] [--threads 2] [--record [FILE]]

Types are dequantised to bf16, from random blocks in memory. Each file is loaded in a process of its own, after the
bundled model, so that imports do not count; peak memory is what the load adds to the process, divided by the weights.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

import evidence
from sebp_edge.gguf.quantised import TYPES, QuantType, dequantise

SOURCES = ("sebp_edge/gguf", "sebp_edge/models/gguf_base.py", "sebp_edge/models/loading.py", __file__)
NUM_WEIGHTS = 2**25
REPETITIONS = 3
LOAD = """
import json, sys, time
import torch
import gguf_loading
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe

file, threads, in_4bit = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
torch.set_num_threads(threads)
recipe = Recipe.load("notes").replace(load_in_4bit=in_4bit)
load_base_model(resolve("tiny"), recipe, torch.device("cpu"))
before, start = gguf_loading.restart_peak(), time.perf_counter()
base = load_base_model(resolve(file), recipe, torch.device("cpu"))
seconds = time.perf_counter() - start
size = sum(weight.nbytes for weight in base.model.parameters())
print(json.dumps([seconds, base.num_parameters / 1e9, size, gguf_loading.memory("VmHWM") - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [dequantising(kind) for kind in TYPES.values()]
    rows += [loading(file, options.threads, in_4bit) for file in options.files for in_4bit in (False, True)]
    if options.record:
        evidence.record("gguf-loading", SOURCES, rows, options.record, on_cpu=True)


def dequantising(kind: QuantType) -> dict:
    """Returns the best times of a type, in seconds for a billion weights: elapsed, and of all cores together."""
    raw = torch.randint(0, 256, (NUM_WEIGHTS // kind.weights * kind.size,), dtype=torch.uint8)
    out, times = torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16), []
    for _ in range(REPETITIONS):
        start, busy = time.perf_counter(), time.process_time()
        dequantise(raw, kind, out)
        times.append((time.perf_counter() - start, time.process_time() - busy))
    elapsed, busy = (1e9 / NUM_WEIGHTS * min(column) for column in zip(*times, strict=True))
    print(f"{kind.name:6}{elapsed:>7.2f} s for a billion weights, {busy:.2f} s of all cores", flush=True)
    return {"what": kind.name, "seconds_per_billion": elapsed, "core_seconds_per_billion": busy}


def loading(file: Path, threads: int, in_4bit: bool) -> dict:
    """Returns the time to load a file, and the memory that it takes for each byte of the loaded weights."""
    command = [sys.executable, "-c", LOAD, str(file), str(threads), str(in_4bit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    seconds, billions, size, peak = json.loads(done.stdout.splitlines()[-1])
    name = f"{file.stem} in {'4 bits' if in_4bit else 'full precision'}"
    print(f"{name}: {seconds:.1f} s, {seconds / billions:.1f} s for a billion weights, {peak / size:.2f} x the weights")
    return {"what": name, "seconds": seconds, "seconds_per_billion": seconds / billions, "peak_ratio": peak / size}


def restart_peak() -> int:
    """Starts the process's peak memory anew; returns its memory, in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(what: str) -> int:
    """Returns a figure of the process's memory, in bytes: "VmRSS" now, "VmHWM" at its peak."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main()
