"""Measures how a large text is read, compared, tokenised and planned for: memory, seconds, the longest silence.

    python kernels/bench/memory/large_text.py [--megabytes 20] [--record [FILE]]

The text has paragraphs of examples/notes with half of their words drawn anew; in a second one, every paragraph ends
with an emoji, which takes four bytes a character in memory. Each runs in a process of its own, on the CPU, after a
short one has been planned for. Peak memory is what the process grows by; a silence is the time between two events. A
stop is Ctrl-C halfway through each stage; the longest time until the call ends counts.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence

NOTES = evidence.ROOT / "examples" / "notes"
PREPARED = (
    "sebp_edge/reading",
    "sebp_edge/lessons",
    "sebp_edge/run/preparation.py",
    "sebp_edge/engine/memory/choosing.py",
)
SOURCES = (*PREPARED, NOTES, __file__)
KINDS = {"plain": "", "with emoji": " 🙂"}
STAGES = ("comparing", "tokenising", "planning")
PREPARE = """
import json, signal, sys, time
from pathlib import Path

import torch

torch.set_num_threads(1)
from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.personalizer import Personalizer

path, stage_to_stop = Path(sys.argv[1]), sys.argv[2]
seconds, last, longest, stopped_at = {}, None, 0.0, None

def sink(event):
    global last, longest, stopped_at
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    if event.stage != "planning":
        peaks.append(peak_resident() - before)
    begun.setdefault(event.stage, now)
    seconds[event.stage] = now - begun[event.stage]
    if stopped_at is None and event.stage == stage_to_stop and 2 * event.done >= event.total > 0:
        stopped_at = now
        signal.setitimer(signal.ITIMER_REAL, 0.05)

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
begun, peaks, personalizer = {}, [], Personalizer("tiny", device="cpu", on_event=sink)
Personalizer("tiny", device="cpu").plan([" ".join(f"word {n}" for n in range(400))])
before, start, busy = resident(), time.monotonic(), time.process_time()
last = start
try:
    personalizer.plan(path)
except KeyboardInterrupt:
    print(json.dumps({"stop": time.monotonic() - stopped_at}))
else:
    last_gap = time.monotonic() - last
    print(json.dumps({
        "seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - busy,
        "peak": peaks[-1], "peak_with_plan": peak_resident() - before, "silence": max(longest, last_gap), **seconds,
    }))
"""


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=20)
    options = parser.parse_args()
    rows = [preparing(kind, int(options.megabytes * 1e6)) for kind in KINDS]
    evidence.record("large-text", SOURCES, rows, options.record, on_cpu=True)


def preparing(kind: str, size: int) -> dict:
    """Returns the figures of one text; bytes and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(make_text(size, KINDS[kind]), encoding="utf-8")
        figures = run(path, "")
        figures["stop"] = max(run(path, stage).get("stop", 0.0) for stage in STAGES)
        return evidence.show({"text": kind, "bytes": path.stat().st_size, **figures})


def run(path: Path, stage: str) -> dict:
    command = [sys.executable, "-c", PREPARE, str(path), stage]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def make_text(size: int, end: str, seed: int = 0) -> str:
    """Returns a text of about `size` bytes, whose paragraphs end with `end`."""
    draw = random.Random(seed)
    files = sorted(NOTES.rglob("*.md"))
    paragraphs = [part for file in files for part in file.read_text(encoding="utf-8").split("\n\n")]
    words = [word for paragraph in paragraphs for word in paragraph.split()]
    parts, length = [], 0
    while length < size:
        old = draw.choice(paragraphs).split(" ")
        parts.append(" ".join(draw.choice(words) if draw.random() < 0.5 else word for word in old) + end)
        length += len(parts[-1].encode()) + 2
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
