"""Times `sebp-edge ask` without a reader, from the command to the quotation; each in a process of its own.

    python kernels/bench/speed/asking.py [--folders FOLDER...] [--runs 15] [--record [FILE]]

The folders are by default this project's example notes. `--help` alternates with it, so that what reading and searching
take is also known on a busy machine. A run that imports torch is an error.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.reading.readers import read_texts

SOURCES = ("sebp_edge", __file__)
NOTES = evidence.ROOT / "examples" / "notes"
QUESTION = "Where are the matches?"
CODE = "import sys; from sebp_edge.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--folders", type=Path, nargs="+", default=[NOTES])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = [measure(folder, options.runs) for folder in options.folders]
    evidence.record("asking", SOURCES, rows, options.record, on_cpu=True)


def measure(folder: Path, runs: int) -> dict:
    """The medians of both commands, in seconds and in seconds of a CPU core."""
    with tempfile.TemporaryDirectory() as data:
        environment = os.environ | {"XDG_DATA_HOME": data}
        commands = {"": ["ask", QUESTION, str(folder)], "help_": ["--help"]}
        times = {f"{name}{unit}": [] for name in commands for unit in ("seconds", "cpu_seconds")}
        for number in range(runs + 1):
            for name, command in commands.items():
                begin, before = time.perf_counter(), cpu_seconds()
                subprocess.run([sys.executable, "-c", CODE, *command], env=environment, check=True, capture_output=True)
                if number:  # the first one fills caches
                    times[f"{name}seconds"].append(time.perf_counter() - begin)
                    times[f"{name}cpu_seconds"].append(cpu_seconds() - before)
    found = {name: round(median(each), 3) for name, each in times.items()}
    return evidence.show({"notes": len(read_texts(folder).documents), **found})


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
