"""Times generating, asking and training on two cores of the CPU while other programs keep them busy.

    python kernels/bench/speed/busy.py [--beside 0 1 2 4] [--at-once 1] [--rounds 1] [--models tiny] [--record]

Beside so many processes that only compute, one process generates text, asks the example notes, and trains on texts of
128 tokens, one a step. The model has the shape of SmolLM2-135M and random weights, or `--models` names others. The ways
are those of `WAYS`; rounds are interleaved, and the least of each figure counts. Figures are infinite if they were not
there within `LIMIT` seconds. `--at-once N` measures N loads at a time, each on two cores of its own.
"""

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.basics.children import ending_with_this

SOURCES = ("sebp_edge/machine", "sebp_edge/engine/models", "sebp_edge/run", __file__)
# By way: what it changes in the environment of the process.
SPINS = "SEBP_EDGE_BENCH_SPINS"
WAYS = {
    "as it is": {},
    "always spinning": {SPINS: "1"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BESIDE = (0, 1, 2, 4)
BUSY = "while True: sum(range(1000))"
NEW_TOKENS, STEPS, LIMIT = 32, 6, 20.0
RECIPE = {"batch_tokens": 128, "context_length": 128, "epochs": 1, "learning_rate": 1e-5}
FIGURES = ("token_s", "ask_s", "step_s")


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", type=int, nargs="+", default=BESIDE, metavar="PROCESSES")
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--model", help="of a process that is measured")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(measure(options.model)))
        return
    from models import known_config
    from speed.end_to_end import ensure_model_folder

    folder = Path(tempfile.gettempdir()) / "sebp-edge-end-to-end" / "smollm2-135m"
    models = options.models or [str(ensure_model_folder(folder, known_config("smollm2-135m")))]
    all_cores = sorted(os.sched_getaffinity(0))
    pairs = iter([all_cores[at : at + 2] for at in range(0, 2 * options.at_once, 2)])
    own = threading.local()

    def take_cores() -> None:
        own.cores = next(pairs)

    def beside(number: int) -> list[dict]:
        return rows_beside(number, models, options.rounds, own.cores)

    with ThreadPoolExecutor(options.at_once, initializer=take_cores) as at_once:
        rows = [evidence.show(row) for found in at_once.map(beside, options.beside) for row in found]
    evidence.record("busy", SOURCES, rows, options.record, on_cpu=True)


def rows_beside(number: int, models: list[str], rounds: int, cores: list[int]) -> list[dict]:
    """One row per model and way, beside so many busy processes on these cores."""
    on_cores = partial(os.sched_setaffinity, 0, cores)
    with ExitStack() as stack:
        for _ in range(number):
            busy = ending_with_this([sys.executable, "-c", BUSY])
            stack.callback(subprocess.Popen(busy, start_new_session=True, preexec_fn=on_cores).kill)
        found = {(model, way): [] for model in models for way in WAYS}
        for _ in range(rounds):
            for model, way in found:
                command = [sys.executable, __file__, "--model", model]
                environment = os.environ | WAYS[way]
                done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, preexec_fn=on_cores, check=True)
                found[model, way].append(json.loads(done.stdout))
    return [
        {"model": Path(model).name, "beside": number, "way": way}
        | {name: min(one[name] for one in figures) for name in FIGURES}
        for (model, way), figures in found.items()
    ]


def measure(model: str) -> dict[str, float]:
    """Returns the seconds of a token, of an answer, and of a step, in this process."""
    from sebp_edge import Personalizer, Recipe
    from sebp_edge.machine.crowding import Crowding

    if SPINS in os.environ:
        Crowding.watched = lambda self, device: nullcontext()

    notes = evidence.ROOT / "examples" / "notes"
    words = " ".join(path.read_text(encoding="utf-8") for path in sorted(notes.rglob("*.md"))).split()
    draw, steps = random.Random(0), []
    texts = [" ".join(draw.sample(words, 120)) for _ in range(3 * STEPS)]

    def on_event(event) -> None:
        if event.event == "step":
            steps.append(time.perf_counter())
            if len(steps) > STEPS:
                personalizer.stop()

    with tempfile.TemporaryDirectory() as store:
        recipe = Recipe.load("notes").replace(**RECIPE)
        personalizer = Personalizer(model, recipe=recipe, store=store, device="cpu", on_event=on_event)
        generate = partial(personalizer.generate, "# Plot 14:", adapter=None)
        ask = partial(personalizer.ask, texts=notes, adapter=None, max_new_tokens=4)
        generate(max_new_tokens=2)
        token = seconds(personalizer, partial(generate, max_new_tokens=NEW_TOKENS)) / NEW_TOKENS
        ask("When was the ramp repaired?")  # reads the notes
        answer = seconds(personalizer, partial(ask, "Who paid for the pumpkin?"))
        seconds(personalizer, partial(personalizer.adapt, texts))
    of_steps = [after - before for before, after in itertools.pairwise(steps)]
    return {"token_s": token, "ask_s": answer, "step_s": statistics.median(of_steps) if of_steps else math.inf}


def seconds(personalizer, call) -> float:
    """Returns the seconds of a call, which is stopped after `LIMIT`; infinite then."""
    from sebp_edge.errors import TrainingStopped

    timer = threading.Timer(LIMIT, personalizer.stop)
    timer.start()
    begin = time.perf_counter()
    with suppress(TrainingStopped):
        call()
        timer.cancel()
        return time.perf_counter() - begin
    timer.cancel()
    return math.inf


if __name__ == "__main__":
    main()
