"""Measures the frames of another program while `sebp-edge adapt` trains beside it, politely and not.

    python kernels/bench/speed/politeness.py [--seconds 30] [--record [FILE]]          4 ms of the processor a frame
    python kernels/bench/speed/politeness.py --gpu [--seconds 30] [--record [FILE]]    about 4 ms of the GPU a frame

The other program is a process in a session of its own, as those of a desktop are. It begins a frame 60 times a second,
or as soon as the one before is done. A frame is late if it takes more than a 60th of a second from when it was due.
The training is of "tiny" on the CPU, and of the shape of Llama-3.2-3B on a GPU. Two epochs are over when the frames
begin, so that nothing is left to compile or to capture, and it never ends by itself. The rate of its tokens is that of
the steps meanwhile.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config
from speed.end_to_end import COMMAND, NOTES, TINY_MODEL, ensure_model_folder

FRAME, WORK = 1 / 60, 0.004  # in seconds
SOURCES = ("sebp_edge/run", "sebp_edge/engine/training", "sebp_edge/machine", __file__)
# What the training is asked for; None without one.
ON_CPU = {"no training": None, "training": [], "--threads 1": ["--threads", "1"], "--polite": ["--polite"]}
ON_GPU = {"no training": None, "training": []} | {f"--gpu-share {n}": ["--gpu-share", str(n)] for n in (75, 50, 25)}
RECIPE = "learning_rate = 1e-6\nepochs = 1000\npatience = 1000\nbatch_tokens = 512\ncontext_length = 512\n"


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--frames", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.frames:
        print(json.dumps(draw(options.seconds, on_gpu=options.gpu)))
        return
    model = TINY_MODEL
    if options.gpu:
        folder = Path(tempfile.gettempdir()) / "sebp-edge-end-to-end" / "llama-3.2-3b"
        model = ensure_model_folder(folder, known_config("llama-3.2-3b"))
    rows = []
    for name, arguments in (ON_GPU if options.gpu else ON_CPU).items():
        with contextlib.nullcontext(lambda: None) if arguments is None else training(model, arguments) as rate:
            command = [sys.executable, __file__, "--frames", "--seconds", str(options.seconds)]
            command += ["--gpu"] if options.gpu else []
            rate()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, start_new_session=True)
            frames, tokens = json.loads(done.stdout), rate()
        cuts = quantiles(frames, n=100)
        late = sum(frame > FRAME for frame in frames) / len(frames)
        row = {"case": name, "median_ms": 1e3 * cuts[49], "p95_ms": 1e3 * cuts[94], "p99_ms": 1e3 * cuts[98]}
        rows.append(evidence.show(row | {"late": late, "frames": len(frames), "tokens_per_second": tokens}))
    name = "politeness-gpu" if options.gpu else "politeness"
    evidence.record(name, SOURCES, rows, options.record, on_cpu=not options.gpu)


def draw(seconds: float, *, on_gpu: bool) -> list[float]:
    """Draws frames for some seconds; returns how long after it was due each of them was done, in seconds."""
    work = gpu_work() if on_gpu else cpu_work
    frames, due = [], time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        work()
        done = time.perf_counter()
        frames.append(done - due)
        due = max(due + FRAME, done)
    return frames


def cpu_work() -> None:
    """Takes 4 ms of the processor, however long that is."""
    end = time.thread_time() + WORK
    while time.thread_time() < end:
        sum(range(100))


def gpu_work():
    """Returns a function that takes about 4 ms of a GPU that nobody else uses, in many small kernels."""
    import torch

    x = torch.zeros(512, 512, device="cuda")

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            x @ x
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(100)
    count = max(1, round(100 * WORK / min(run(100) for _ in range(10))))
    return lambda: run(count)


@contextlib.contextmanager
def training(model: Path, arguments: list[str]) -> Iterator:
    """Context in which a training runs beside; yields a function: its tokens per second since the last call."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "long.toml").write_text(RECIPE)
        command = [*COMMAND, NOTES, "--model", model, "--recipe", Path(folder) / "long.toml", "--json", *arguments]
        environment = os.environ | {"XDG_DATA_HOME": folder}
        steps = queue.SimpleQueue()
        with subprocess.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, start_new_session=True
        ) as one:
            threading.Thread(target=read, args=(one, steps), daemon=True).start()
            if (first := steps.get()) is None:
                raise RuntimeError(f"{' '.join(map(str, command))} ended before its third epoch.")
            last = [(first["tokens"], first["time"])]

            def rate() -> float | None:
                while not steps.empty() and (event := steps.get()):
                    last.append((event["tokens"], event["time"]))
                (tokens, begin), (more, end) = last[0], last[-1]
                last[:-1] = []
                return (more - tokens) / (end - begin) if end > begin else None

            try:
                yield rate
            finally:
                one.kill()


def read(one: subprocess.Popen, steps: queue.SimpleQueue) -> None:
    """Puts the steps after the second epoch, and None at the end."""
    for line in one.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["epoch"] > 2:
            steps.put(event)
    steps.put(None)


if __name__ == "__main__":
    main()
