"""Measures an export's time and peak memory, on a model with random weights, and a random LoRA adapter.

    python kernels/bench/formats/export.py [--model llama-3.2-3b] [--quants q8_0 q4_0] [--folder FOLDER] [--read-back]
                                   [--record [FILE]]

Each file is written by a process of its own, without and, with --read-back, with reading it back. The peak is of the
process's own memory: mapped files, whose pages the system may drop at any time, are not in it. Writing and reading are
through the disk, which has the base model in its cache.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.fingerprint import fingerprint
from sebp_edge.engine.models.loading import BaseModel, local_tokenizer, model_from_config, without_progress_bars
from sebp_edge.engine.models.lora import LoraAdapter
from sebp_edge.events import silent
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.formats import Gguf
from sebp_edge.export.source import Source
from sebp_edge.store.record import RECORD, AdapterRecord
from sebp_edge.values.model_reference import BUNDLED_FOLDER

SOURCES = ("sebp_edge/export", "sebp_edge/engine/models/gguf", "sebp_edge/engine/models", __file__)
_SECONDS_BETWEEN_SAMPLES = 0.02


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-3b")
    parser.add_argument("--quants", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's temporary folder")
    parser.add_argument("--read-back", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "QUANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Path(options.one[0]), options.one[1], read_back=options.read_back)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        parameters = prepare(Path(folder), options.model)
        for quant in options.quants:
            for read_back in (False, True)[: 1 + options.read_back]:
                command = [sys.executable, __file__, "--one", folder, quant] + ["--read-back"] * read_back
                found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                about = {"model": options.model, "parameters": parameters, "read_back": read_back}
                rows.append(evidence.show(about | found))
    evidence.record("export", SOURCES, rows, options.record, on_cpu=True)


def prepare(folder: Path, name: str) -> int:
    """Writes the base model in bf16 and the adapter; returns the number of parameters."""
    torch.manual_seed(0)
    model = model_from_config(resolve(name), torch.device("cpu"), torch.bfloat16)
    with without_progress_bars():
        model.save_pretrained(folder / "model")
    for file in Path(BUNDLED_FOLDER).glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    reference = resolve(folder / "model")
    identity = fingerprint(type(model).__name__, folder / "model")
    base = BaseModel(reference, model, local_tokenizer(reference), torch.device("cpu"), torch.bfloat16, identity)
    write_adapter(folder / "adapter", base, 0.01)
    return model.num_parameters()


def write_adapter(folder: Path, base: BaseModel, spread: float) -> None:
    """Writes a random adapter into a new folder, as a version of the store is.

    Args:
        spread: the standard deviation of lora_B.
    """
    adapter = LoraAdapter.fresh(base, Recipe.load("notes"), seed=0)
    torch.manual_seed(1)
    for name, parameter in adapter.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=spread)
    folder.mkdir()
    adapter.save(folder)
    adapter.detach()
    record = AdapterRecord(
        base_model=base.reference.public_name,
        model=base.reference.name,
        fingerprint=base.fingerprint,
        recipe=asdict(Recipe.load("notes")),
        documents=1,
        examples=1,
        tokens=1,
        seed=0,
    )
    (folder / RECORD).write_text(json.dumps(asdict(record)))


def measure(folder: Path, quant: str, *, read_back: bool) -> dict:
    """Exports once, in this process."""
    before, out = anonymous_bytes(), folder / "out"
    peak = Peak()
    begin = time.perf_counter()
    with peak:
        if read_back:
            Personalizer(folder / "model", device="cpu", on_event=silent).export(folder / "adapter", out, quant=quant)
        else:
            out.mkdir()
            record = AdapterRecord.read(folder / "adapter")
            source = Source.open("adapter", folder / "adapter", record, resolve(folder / "model"))
            Gguf(source, quant).write(out, ExportProgress())
    seconds = time.perf_counter() - begin
    file_bytes = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    return {"quant": quant, "seconds": seconds, "peak_bytes": peak.bytes - before, "file_bytes": file_bytes}


def anonymous_bytes() -> int:
    """This process's memory without the pages of files."""
    found = psutil.Process().memory_info()
    return found.rss - found.shared


class Peak:
    """Samples this process's memory in a thread."""

    def __init__(self):
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SECONDS_BETWEEN_SAMPLES):
            self.bytes = max(self.bytes, anonymous_bytes())


if __name__ == "__main__":
    main()
