"""Times how GGUF files are read on the CPU: seconds for a billion weights of each type, and the load of whole files.

    python kernels/bench/formats/gguf_loading.py [FILE.gguf...] [--shape llama-3.2-3b] [--quants q8_0 q4_0]
                                         [--folder FOLDER] [--threads 1 2] [--record [FILE]]

Types are dequantised to bf16, from random blocks in memory. Each file is loaded by a process of its own, in full
precision and to NF4, after the bundled model, so that imports do not count. It is in the page cache and hashed. Peak
memory is what the load adds to the process. --shape writes files with random weights of a known model's shape, into
--folder for the time of the run, and loads them in bf16, as for a GPU: in fp32, as the CPU has it, a 3B would need
13 GB.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.fingerprint import file_fingerprint
from sebp_edge.engine.models.gguf.quantised import TYPES, QuantType, dequantise
from sebp_edge.engine.models.gguf.writer import GgufModel
from sebp_edge.engine.models.loading import local_tokenizer, model_from_config
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.gguf_file import write_model
from sebp_edge.export.gguf_tokenizer import GgufTokenizer

SOURCES = (
    "sebp_edge/engine/models/gguf",
    "sebp_edge/machine/devices.py",
    "sebp_edge/engine/models/gguf_base.py",
    "sebp_edge/engine/models/loading.py",
    __file__,
)
NUM_WEIGHTS = 2**25
REPETITIONS = 3
LOAD = """
import gc, json, sys, time
import torch
from formats import gguf_loading
from sebp_edge.machine import devices
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.recipe import Recipe

file, threads, in_4bit, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4]
torch.set_num_threads(threads)
cpu, recipe = torch.device("cpu"), Recipe.load("notes").replace(load_in_4bit=in_4bit)
load_base_model(resolve("tiny"), recipe, cpu)
devices.pick_dtype = lambda device, width: getattr(torch, dtype)
gc.collect()
devices.release_memory(cpu)
before, start = gguf_loading.restart_peak(), time.perf_counter()
base = load_base_model(resolve(file), recipe, cpu)
seconds = time.perf_counter() - start
size = sum(weight.nbytes for weight in base.model.parameters())
print(json.dumps([seconds, base.num_parameters / 1e9, size, gguf_loading.memory("VmHWM") - before]))
"""


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shape", help="a known model")
    parser.add_argument("--quants", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's temporary folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    rows = [dequantising(kind, threads) for threads in options.threads for kind in TYPES.values()]
    most = max(options.threads)
    for file in options.files:
        rows += loading(file, most, "float32")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for quant in options.quants if options.shape else ():
            file = write_shape(Path(folder), options.shape, quant)
            rows += loading(file, most, "bfloat16")
            file.unlink()
    evidence.record("gguf-loading", SOURCES, rows, options.record, on_cpu=True)


def dequantising(kind: QuantType, threads: int) -> dict:
    """Returns the best time of a type, in seconds for a billion weights."""
    torch.set_num_threads(threads)
    raw = torch.randint(0, 256, (NUM_WEIGHTS // kind.weights * kind.size,), dtype=torch.uint8)
    out, times = torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16), []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        dequantise(raw, kind, out)
        times.append(time.perf_counter() - start)
    elapsed = 1e9 / NUM_WEIGHTS * min(times)
    return evidence.show({"what": kind.name, "threads": threads, "seconds_per_billion": elapsed})


class RandomWeights:
    """Weights of a model's shapes, of which most are parts of one random tensor."""

    def __init__(self, model):
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        largest = max(shape.numel() for shape in self.shapes.values())
        self._values = 0.02 * torch.randn(largest, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self._values[: shape.numel()].view(shape)


def write_shape(folder: Path, name: str, quant: str) -> Path:
    """Writes a GGUF file with random weights of a known model's shape, and the bundled tokenizer."""
    model, file = model_from_config(resolve(name)), folder / f"{name}-{quant}.gguf"
    gguf = GgufModel(model.config)
    tokenizer = GgufTokenizer(local_tokenizer(resolve("tiny")), model.config.vocab_size, gguf.arch)
    write_model(file, name, gguf, tokenizer, RandomWeights(model), quant, ExportProgress())
    return file


def loading(file: Path, threads: int, dtype: str) -> Iterator[dict]:
    """Yields the time and memory of loading a file in full precision, and to NF4."""
    file_fingerprint(file)
    for in_4bit in (False, True):
        with file.open("rb") as opened:  # puts it into the page cache
            while opened.read(2**24):
                pass
        command = [sys.executable, "-c", LOAD, str(file), str(threads), str(in_4bit), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        seconds, billions, size, peak = json.loads(done.stdout.splitlines()[-1])
        about = {"what": file.stem, "to": "NF4" if in_4bit else dtype, "threads": threads}
        about |= {"seconds_per_billion": seconds / billions, "seconds": seconds}
        yield evidence.show(about | {"weight_bytes": size, "peak_bytes": peak})


def restart_peak() -> int:
    """Starts the process's peak memory anew; returns its memory, in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(what: str) -> int:
    """Returns a figure of the process's memory, in bytes: "VmRSS" now, "VmHWM" at its peak."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main()
