"""Times `sebp-edge adapt` on texts in which nothing is new, beside `sebp-edge --help`; each in a process of its own.

    python kernels/bench/speed/nothing_new.py [--notes 60 1000] [--runs 15] [--record [FILE]]

The notes are chains of words, a file each, and were learnt before with the bundled model. The two commands alternate,
so that the ratio also holds on a busy machine.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.reading.readers import read_texts

SOURCES = ("sebp_edge", __file__)
COMMAND = [sys.executable, "-c", "from sebp_edge.cli import main; main()"]


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--notes", type=int, nargs="+", default=[60, 1000])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = [measure(number, options.runs) for number in options.notes]
    evidence.record("nothing-new", SOURCES, rows, options.record, on_cpu=True)


def measure(number: int, runs: int) -> dict:
    """The medians of both commands, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        notes, data = Path(folder) / "notes", Path(folder) / "data"
        notes.mkdir()
        for index, text in enumerate(chain_notes(number, lambda draw: draw.randint(20, 90))):
            (notes / f"{index}.md").write_text(text, encoding="utf-8")
        environment = os.environ | {"XDG_DATA_HOME": str(data)}
        again = [*COMMAND, "adapt", str(notes), "--epochs", "1", "--activate-anyway"]
        subprocess.run(again, env=environment, check=True, capture_output=True)
        times = {"help": [], "nothing new": []}
        for _ in range(runs):
            for name, command in (("help", [*COMMAND, "--help"]), ("nothing new", again)):
                begin = time.perf_counter()
                output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                times[name].append(time.perf_counter() - begin)
                if name == "nothing new" and not output.startswith("Nothing is new"):
                    raise RuntimeError(output)
    helped, found = (median(times[name]) for name in ("help", "nothing new"))
    return evidence.show({"notes": number, "seconds": found, "help_seconds": helped, "ratio": found / helped})


def chain_notes(number: int, num_words: Callable[[random.Random], int]) -> Iterator[str]:
    """Yields texts in which each word follows the one before it somewhere in examples/notes; draws their lengths."""
    following, draw = defaultdict(list), random.Random(0)
    for document in read_texts(evidence.ROOT / "examples" / "notes").documents:
        for word, next_word in pairwise(document.content.split()):
            following[word].append(next_word)
    beginnings = sorted(word for word in following if word[:1].isupper())
    for _ in range(number):
        words = [draw.choice(beginnings)]
        for _ in range(num_words(draw)):
            words.append(draw.choice(following.get(words[-1]) or beginnings))
        yield " ".join(words)


if __name__ == "__main__":
    main()
