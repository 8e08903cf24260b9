"""Times generating, asking and training on the CPU while other programs keep it busy.

    python kernels/bench/speed/busy.py [--beside 0 1 2 4] [--rounds 2] [--record [FILE]]

The model has the shape of SmolLM2-135M and random weights. Beside so many processes that only compute, one process
generates text, asks the example notes, and trains on texts of 128 tokens, one a step: as the product does it, then with
threads that wait passively (OMP_WAIT_POLICY), then with one thread. Each figure is the least of the rounds, which are
interleaved. Run it on the number of cores that is to be measured, such as `taskset -c 0,1 python ...`.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence

SOURCES = ("sebp_edge/machine", "sebp_edge/models", "sebp_edge/run", __file__)
# By way: what it changes in the environment of the process.
WAYS = {
    "as it is": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
NEW_TOKENS, STEPS = 24, 8
RECIPE = {"batch_tokens": 128, "context_length": 128, "epochs": 1, "learning_rate": 1e-5}
BUSY = "while True: sum(range(1000))"
FIGURES = ("token_s", "ask_s", "step_s")


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 2, 4], metavar="PROCESSES")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default="", help="JSON: further ways by name, each an environment")
    parser.add_argument("--model", type=Path, help="in a process that is measured")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(measure(options.model)))
        return
    from models import known_config
    from speed.end_to_end import ensure_model_folder

    folder = Path(tempfile.gettempdir()) / "sebp-edge-end-to-end" / "smollm2-135m"
    model = ensure_model_folder(folder, known_config("smollm2-135m"))
    ways = WAYS | json.loads(options.ways or "{}")
    rows = []
    for beside in options.beside:
        found = {way: [] for way in ways}
        with ExitStack() as stack:
            for _ in range(beside):
                stack.callback(subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True).kill)
            for _ in range(options.rounds):
                for way, environment in ways.items():
                    found[way].append(run(model, environment))
        for way, rounds in found.items():
            least = {name: min(one[name] for one in rounds) for name in FIGURES}
            rows.append(evidence.show({"beside": beside, "way": way, **least}))
    evidence.record("busy", SOURCES, rows, options.record, on_cpu=True)


def run(model: Path, environment: dict[str, str]) -> dict[str, float]:
    """Measures in a new process."""
    command = [sys.executable, __file__, "--model", str(model)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | environment)
    return json.loads(done.stdout)


def measure(model: Path) -> dict[str, float]:
    """Returns the seconds of a token, of an answer, and of a step."""
    from sebp_edge import Personalizer, Recipe

    notes = evidence.ROOT / "examples" / "notes"
    words = " ".join(path.read_text(encoding="utf-8") for path in sorted(notes.rglob("*.md"))).split()
    draw = random.Random(0)
    texts = [" ".join(draw.sample(words, 120)) for _ in range(3 * STEPS)]
    with tempfile.TemporaryDirectory() as store:
        recipe = Recipe.load("notes").replace(**RECIPE)
        times: list[float] = []

        def on_event(event) -> None:
            if event.event == "step":
                times.append(time.perf_counter())
                if len(times) > STEPS:
                    personalizer.stop()

        personalizer = Personalizer(model, recipe=recipe, store=store, device="cpu", on_event=on_event)
        personalizer.generate("# Plot 14:", adapter=None, max_new_tokens=2)
        found = {"token_s": timed(lambda: personalizer.generate("# Plot 14:", adapter=None, max_new_tokens=NEW_TOKENS))}
        found["token_s"] /= NEW_TOKENS
        ask = {"texts": notes, "adapter": None, "max_new_tokens": 4}
        personalizer.ask("When was the ramp repaired?", **ask)  # reads the notes
        found["ask_s"] = timed(lambda: personalizer.ask("Who paid for the pumpkin?", **ask))
        try:
            personalizer.adapt(texts)
        except Exception:
            if len(times) <= STEPS:
                raise
        found["step_s"] = statistics.median(b - a for a, b in itertools.pairwise(times))
    return found


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
