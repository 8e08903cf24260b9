"""Times a lesson: a few new notes that a warm `sebp-edge serve` learns on, from the request to the active version.

    python kernels/bench/speed/lesson.py [tiny | FOLDER | FILE] [--device cpu] [--beside PYTHON] [--record [FILE]]
    python kernels/bench/speed/lesson.py --shape llama-3.2-3b --device cuda [--record [FILE]]

A first version learns 60 notes; it is made once and stays in --work. A server answers a request with it, and learns 5
more notes, which fills its caches; then three times 5 more. `--beside` is the Python of another installation, whose
server starts at the same version; the two take turns, lesson by lesson. A shape is a known model's with random bf16
weights and the bundled model's tokenizer. The notes are chains of words: each word follows the one before it somewhere
in examples/notes.

"active" is when the new version is active, "done" when it is assessed too; both are seconds from the request.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config
from sebp_edge.serve.client import Client
from speed.end_to_end import ensure_model_folder
from speed.nothing_new import chain_notes

SOURCES = ("sebp_edge/serve", "sebp_edge/run", "sebp_edge/engine/training", "recipes/notes.toml", __file__)
NAME, FIRST, NEW, LESSONS = "lesson", 60, 5, 3
# Words of a note: the median, and the spread of its logarithm.
WORDS, SPREAD = 45, 0.6


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--shape", metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside", metavar="PYTHON")
    default = Path(tempfile.gettempdir()) / "sebp-edge-lesson"
    parser.add_argument("--work", type=Path, default=default, metavar="FOLDER", help=f"by default {default}")
    options = parser.parse_args()
    model = options.model
    if options.shape:
        model = str(ensure_model_folder(options.work / options.shape, known_config(options.shape)))
    arms = {"this": sys.executable} | ({"beside": options.beside} if options.beside else {})
    name = Path(model).name.removesuffix(".gguf")
    rows = asyncio.run(measure(model, options.device, arms, options.work / f"first-{name}-{options.device}"))
    rows = [{"model": name} | row for row in rows]
    evidence.record(f"lesson-{name}", SOURCES, rows, options.record, on_cpu=options.device == "cpu")


async def measure(model: str, device: str, arms: dict[str, str], first: Path) -> list[dict]:
    """Returns a row for each lesson and installation, which begins with a copy of the folder of the first version."""
    notes, rows = list(chain_notes(FIRST + (1 + LESSONS) * NEW, num_words)), []
    common = {"name": NAME, "model": model, "device": device}
    if not first.exists():
        make = first.with_name(f"{first.name}.part")
        shutil.rmtree(make, ignore_errors=True)
        write(make / "notes", notes, range(FIRST))
        async with await start(sys.executable, make, model) as client:
            await learn(client, "first", common | {"paths": [str(make / "notes")], "activate_anyway": True})
        make.rename(first)
    async with AsyncExitStack() as stack:
        clients, folders = {}, {}
        for arm, python in arms.items():
            folders[arm] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shutil.copytree(first, folders[arm], dirs_exist_ok=True)
            clients[arm] = await stack.enter_async_context(await start(python, folders[arm], model))
            asked = {"adapter": NAME, "model": model, "device": device, "max_new_tokens": 2}
            await clients[arm].call("generate", prompt="The boat", **asked)
        for lesson in range(1 + LESSONS):
            for arm, client in clients.items():
                texts = folders[arm] / "notes"
                write(texts, notes, range(FIRST + lesson * NEW, FIRST + (lesson + 1) * NEW))
                found = await learn(client, f"lesson-{lesson}", common | {"paths": [str(texts)]})
                evidence.show({"arm": arm, "lesson": lesson} | found)
                rows += [{"arm": arm, "lesson": lesson} | found] if lesson else []
    return rows


async def start(python: str, folder: Path, model: str) -> Client:
    """Starts a server with a store and caches in a folder."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    allowed = [str(folder), *([model] if Path(model).exists() else [])]
    command = (python, "-m", "sebp_edge.serve")
    return await Client.start(command, store=str(folder / "store"), folders=allowed, low_priority=False)


async def learn(client: Client, job: str, params: dict) -> dict:
    """Adapts; returns the seconds until the version was active and until the end, with those of the phases."""
    begin, active = time.perf_counter(), None
    await client.call("jobs.start", id=job, params=params)
    async for event in client.events(job):
        if event["event"]["event"] == "saved" and event["event"]["active"]:
            active = time.perf_counter() - begin
    state = event["event"]
    if state["state"] != "done":
        raise RuntimeError(f"The job {job} is {state['state']}: {state['error']}")
    result = state["result"]
    figures = {"active": active, "done": time.perf_counter() - begin, "new": result["new"]}
    figures |= {key: result[key] for key in ("verdict", "gain", "gain_over_active")}
    return figures | {phase: round(seconds, 3) for phase, seconds in result["phases"].items()}


def num_words(draw: Random) -> int:
    return max(12, round(WORDS * draw.lognormvariate(0, SPREAD)))


def write(folder: Path, notes: list[str], numbers: range) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / f"{number:03}.md").write_text(notes[number])


if __name__ == "__main__":
    main()
