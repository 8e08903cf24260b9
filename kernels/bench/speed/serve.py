"""Times `sebp-edge serve` with "tiny" on the CPU: start, plan, first event and step, answers, cancel, pause; memory.

    python kernels/bench/speed/serve.py [--runs 5] [--record [FILE]]
    python kernels/bench/speed/serve.py --switching tiny|FOLDER|FILE [--runs 40] [--record [FILE]]
    python kernels/bench/speed/serve.py --switching --shape llama-3.2-3b [--runs 40] [--record [FILE]]

An app starts the server and speaks with it as apps do. The texts are the example notes. "cold" has no worker before,
"warm" has one that has answered. Times of a busy machine are too long: the table has the fastest run beside the median.

The protocol's share is processor time: the supervisor's, and the worker's for writing the same events again, over the
worker's from the first event to a step. A job is cancelled at the first event of each phase, and at a random moment;
of many texts in the phases before the training, since a warm worker is through with few before it tells them. Saving
takes no time that could be told.

`--switching` measures apps that speak HTTP, on a GPU if there is one: what an answer takes longer if the request before
it was for another adapter of the same shape, or for the base model, and the first token beside that over standard
input, from the same worker. A shape is a known model's with random bf16 weights and the bundled model's tokenizer.
"""

import asyncio
import http.client
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config
from sebp_edge.events import finite
from sebp_edge.serve.client import Client
from sebp_edge.serve.http.door import open_endpoint
from speed.end_to_end import ensure_model_folder

NOTES = Path(__file__).parents[3] / "examples" / "notes"
SOURCES = ("sebp_edge/serve", "sebp_edge/run", "sebp_edge/engine/training", __file__)
TEXTS = {"paths": [str(NOTES)], "device": "cpu"}
ADAPT = TEXTS | {"name": "notes"}
# Phases whose first event a job is cancelled at: of many texts, of few with an adapter of them, and of an export.
OF_MANY, OF_FEW, OF_EXPORT = (
    ("reading", "comparing", "tokenising"),
    ("active version", "train", "all documents", "samples", "general text", "copies"),
    ("loading", "reading back"),
)
# How many texts are many, and how many an export is measured on, which takes seconds.
MANY, EXPORTED = 10_000, 60
# How many texts are learnt to have an adapter.
LEARNT = 12
# The protocol's share is measured up to this step.
LAST_STEP = 20


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--switching", nargs="?", const="tiny", metavar="MODEL")
    parser.add_argument("--shape", metavar="NAME", help="with --switching")
    default = Path(tempfile.gettempdir()) / "sebp-edge-serve"
    parser.add_argument(
        "--work", type=Path, default=default, metavar="FOLDER", help=f"of a shape; by default {default}"
    )
    options = parser.parse_args()
    if options.switching is not None:
        model = options.switching
        if options.shape:
            model = str(ensure_model_folder(options.work / options.shape, known_config(options.shape)))
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure_switching(model, folder, options.runs or 40))
        name = Path(model).name.removesuffix(".gguf")
        rows = [evidence.show({"model": name} | row_of(what, values, "ms")) for what, values in found.items()]
        evidence.record(f"switching-{name}", SOURCES, rows, options.record, on_cpu=not torch.cuda.is_available())
        return
    found: dict[str, list[float]] = {}
    for _ in range(options.runs or 5):
        with tempfile.TemporaryDirectory() as folder:
            for what, value in asyncio.run(measure(folder)).items():
                found.setdefault(what, []).append(value)
    rows = []
    for what, values in found.items():
        unit = {"memory": "MB", "share": "%"}.get(what.partition(",")[0], "s")
        rows.append(evidence.show(row_of(what, values, unit)))
    evidence.record("serve", SOURCES, rows, options.record, on_cpu=True)


def row_of(what: str, values: list[float], unit: str) -> dict:
    row = {"what": what, "unit": unit}
    return row | {"median": median(values), "best": min(values), "worst": max(values), "runs": len(values)}


async def measure_switching(model: str, store: str, runs: int) -> dict[str, list[float]]:
    """Returns milliseconds of each run, by what they are."""
    found: dict[str, list[float]] = {}
    (short := Path(store, "short.toml")).write_text("epochs = 1\n")
    folders = [str(NOTES), store, *([model] if Path(model).exists() else [])]
    async with await Client.start(store=store, folders=folders, low_priority=False) as client:
        few = {"texts": make_texts()[:LEARNT], "model": model, "name": "first", "recipe": str(short)}
        await until_end(client, "first", few | {"activate_anyway": True})
        await client.call("adapters.export", name="first", to=(archive := f"{store}/archive"))
        await client.call("adapters.import", file=archive, name="second")
        await client.call("adapters.activate", name="second", version=1)
        async with open_endpoint(client, Path(store), model) as (address, token):
            app = App(address, token.read_text(), make_texts())
            for name in ("first", "second", "base"):  # what is compiled and captured
                await app.answered(name)
            for _ in range(runs):
                await app.answered("first")
                same, other = await app.answered("first"), await app.answered("second")
                await app.answered("base")
                after_base = await app.answered("second")
                for what, seconds in {
                    "answer of 4 tokens": same,
                    "another adapter than before": other - same,
                    "the base model before": after_base - same,
                }.items():
                    found.setdefault(what, []).append(1000 * seconds)
            short = {"prompt": "The boat", "model": model, "adapter": "second", "device": None}
            for _ in range(4 * runs):
                piped, by_http = await first_text(client, **short), await app.first_token("second", short["prompt"])
                for what, seconds in {
                    "first token, standard input": piped,
                    "first token, HTTP": by_http,
                    "first token, HTTP - standard input": by_http - piped,
                }.items():
                    found.setdefault(what, []).append(1000 * seconds)
    return found


class App:
    """An app that speaks HTTP over one connection."""

    def __init__(self, address: str, token: str, texts: list[str]):
        host, _, self._path = address.removeprefix("http://").partition("/")
        self._connection = http.client.HTTPConnection(host)
        self._headers, self._texts = {"Authorization": f"Bearer {token}"}, iter(texts)

    async def answered(self, model: str) -> float:
        """Returns the seconds of a whole answer to a prompt that is new, so that nothing of it is known."""
        return await asyncio.to_thread(self._seconds, {"model": model, "max_tokens": 4, "prompt": next(self._texts)})

    async def first_token(self, model: str, prompt: str) -> float:
        """Returns the seconds until the first token."""
        about = {"model": model, "max_tokens": 2, "prompt": prompt, "stream": True}
        return await asyncio.to_thread(self._seconds, about)

    def _seconds(self, about: dict) -> float:
        body = json.dumps(about | {"temperature": 0})
        begin = time.perf_counter()
        self._connection.request("POST", f"/{self._path}/completions", body, self._headers)
        answer = self._connection.getresponse()
        line = answer.readline()
        seconds = time.perf_counter() - begin
        if answer.status != 200 or b"error" in line:
            raise RuntimeError(f"The answer is {answer.status}: {line.decode()}")
        answer.read()
        return seconds


async def measure(store: str) -> dict[str, float]:
    """Returns what one server measured, by what it is."""
    found, begin = {}, time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sebp_edge.serve"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()
    found["ready"] = time.perf_counter() - begin
    found["ready, processor time"] = sum(psutil.Process(process.pid).cpu_times()[:2])
    await Client(process).close()
    async with await Client.start(store=store, folders=[str(NOTES), store], low_priority=False) as client:
        await client.call("adapters.list")
        found["memory, idle"] = memory(client.process.pid)
        for method, params in (("models", {}), ("plan", TEXTS), ("inspect", TEXTS)):
            begin = time.perf_counter()
            await client.call(method, **params)
            found[method] = time.perf_counter() - begin
        found["memory, after models, plan and inspect"] = memory(client.process.pid)
        for warmth in ("cold", "warm"):
            times = await until_step(client, warmth)
            found |= {f"{what}, {warmth}": seconds for what, seconds in times.items()}
        found["first text while a job trains"] = await first_text(client)
        found["cancelled, training"] = await ended(client, "warm", "jobs.cancel")
        found["first text, warm"] = await first_text(client)
        found["share, protocol of a training"] = await protocol_share(client)
        many = {"texts": make_texts(), "device": "cpu", "model": "tiny"}
        # How long a phase takes to end does not depend on the epochs before it.
        (short := Path(store, "short.toml")).write_text("epochs = 1\n")
        few = {"paths": [str(NOTES / "garden")], "device": "cpu", "name": "known", "recipe": str(short)}
        await until_end(client, "known", few | {"activate_anyway": True})
        exported = {"name": "known", "to": f"{store}/out", "format": "merged", "texts": many["texts"][:EXPORTED]}
        for kind, params, phases in (
            ("adapt", many, OF_MANY),
            ("adapt", few | {"fresh": True}, OF_FEW),
            ("export", exported | {"device": "cpu"}, OF_EXPORT),
        ):
            for phase in phases:
                if (seconds := await cancelled_in(client, phase, params, kind)) is not None:
                    found[f"cancelled, {phase}{' of an export' if kind == 'export' else ''}"] = seconds
        found["cancelled, inspect"] = await cancelled_inspection(client, many)
        found["memory, worker"] = (await client.call("status"))["worker"]["memory"] / 1e6
        await until_step(client, "third")
        worker = psutil.Process((await client.call("status"))["worker"]["pid"])
        begin = time.perf_counter()
        found["paused"] = await ended(client, "third", "jobs.pause")
        while worker.is_running():
            await asyncio.sleep(0.001)
        found["paused, and its memory free"] = time.perf_counter() - begin
        begin = time.perf_counter()
        await client.call("jobs.resume", id="third")
        await step(client, "third")
        found["first step after it is resumed"] = time.perf_counter() - begin
        found["cancelled, while its worker starts"] = await cancelled_at_start(client)
    return found


def memory(pid: int) -> float:
    """Returns the resident memory of a process in MB."""
    return psutil.Process(pid).memory_info().rss / 1e6


async def protocol_share(client: Client) -> float:
    """Returns the protocol's share of a training's processor time in percent."""
    processes = [psutil.Process((await client.call("status"))["worker"]["pid"]), psutil.Process(client.process.pid)]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    await client.call("jobs.start", id="share", params=ADAPT | {"name": "share"})
    seen = []
    async for event in client.events("share"):
        seen.append(event["event"])
        if event["event"].get("step") == LAST_STEP:
            break
    worker, supervisor = (sum(process.cpu_times()[:2]) - own for process, own in zip(processes, before, strict=True))
    begin = time.process_time()
    for event in seen:
        json.dumps(finite(event))
    writing = time.process_time() - begin
    await ended(client, "share", "jobs.cancel")
    return 100 * (supervisor + writing) / worker


async def cancelled_in(client: Client, phase: str, params: dict, kind: str) -> float | None:
    """Cancels a job in a phase; returns the seconds until it has ended, or None if it has no such phase."""
    job = f"{kind}-{phase.replace(' ', '-')}"
    await client.call("jobs.start", id=job, kind=kind, params=params)
    async for event in client.events(job):
        is_late = phase in OF_MANY and event["event"]["event"] == "step"
        if event["phase"] == phase or is_late:
            seconds = await ended(client, job, "jobs.cancel", at_once=True)
            return None if is_late else seconds
    return None


async def cancelled_inspection(client: Client, params: dict) -> float:
    """Cancels an inspection half a second after its process has started; returns the seconds until that has ended."""
    server = psutil.Process(client.process.pid)
    others, task = server.children(), asyncio.create_task(client.call("inspect", **params))
    while not (new := [child for child in server.children() if child not in others]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    while new[0].is_running():
        await asyncio.sleep(0.001)
    return time.perf_counter() - begin


async def until_end(client: Client, job: str, params: dict) -> None:
    await client.call("jobs.start", id=job, params=params)
    async for _ in client.events(job):
        pass


def make_texts() -> list[str]:
    """Returns different texts, made of the notes' words."""
    draw, words = random.Random(0), " ".join(path.read_text() for path in sorted(NOTES.rglob("*.md"))).split()
    return [" ".join(draw.choices(words, k=40)) for _ in range(MANY)]


async def until_step(client: Client, job: str) -> dict[str, float]:
    """Starts a job; returns when its first event of the worker and its first step were there."""
    begin, times = time.perf_counter(), {}
    await client.call("jobs.start", id=job, params=ADAPT | {"name": job})
    async for event in client.events(job):
        seconds = time.perf_counter() - begin
        if event["event"]["event"] != "state":
            times.setdefault("first event", seconds)
        if event["event"]["event"] == "step":
            times["first step"] = seconds
            break
    if job == "cold":
        await ended(client, job, "jobs.cancel")
    return times


async def step(client: Client, job: str) -> None:
    since = (await client.call("jobs.get", id=job))["job"]["last_event"]
    async for event in client.events(job, since):
        if event["event"]["event"] == "step":
            return


async def ended(client: Client, job: str, method: str, *, at_once: bool = False) -> float:
    """Cancels or pauses a job, at a random moment if not at once; returns the seconds until it has."""
    await asyncio.sleep(0 if at_once else random.uniform(0, 0.5))
    since = (await client.call("jobs.get", id=job))["job"]["last_event"]
    begin = time.perf_counter()
    await client.call(method, expected_job_id=job)
    async for _ in client.events(job, since):
        pass
    return time.perf_counter() - begin


async def cancelled_at_start(client: Client) -> float:
    await ended(client, "third", "jobs.cancel")
    await client.call("unload")
    await client.call("jobs.start", id="fourth", params=ADAPT | {"name": "fourth"})
    return await ended(client, "fourth", "jobs.cancel")


async def first_text(client: Client, **changes) -> float:
    begin, times = time.perf_counter(), []
    params = {"prompt": "The boat", "device": "cpu", "max_new_tokens": 2, "temperature": 0} | changes
    await client.call("generate", on_text=lambda text: times.append(time.perf_counter() - begin), **params)
    return (times or [time.perf_counter() - begin])[0]  # the first tokens of random weights may be no text


if __name__ == "__main__":
    main()
