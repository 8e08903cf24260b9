"""Times `sebp-edge serve` on the CPU: start, first event and step, answers, cancel, pause; its memory.

    python kernels/bench/speed/serve.py [--runs 5] [--record [FILE]]      with "tiny"
    python kernels/bench/speed/serve.py --model FOLDER                    with another model, whose layers take longer

An app starts the server and speaks with it as apps do. The texts are the example notes. "cold" has no worker before,
"warm" has one that has answered. Times of a busy machine are too long: the table has the fastest run beside the median.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.serve.client import Client

NOTES = Path(__file__).parents[3] / "examples" / "notes"
SOURCES = ("sebp_edge/serve", "sebp_edge/run", "sebp_edge/training", __file__)
ADAPT = {"paths": [str(NOTES)], "device": "cpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    evidence.add_record_option(parser)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            for what, value in asyncio.run(measure(folder, options.model)).items():
                found.setdefault(what, []).append(value)
    rows = [
        {
            "what": what,
            "unit": "MB" if what.startswith("memory") else "s",
            "median": median(values),
            "best": min(values),
            "worst": max(values),
            "runs": len(values),
        }
        for what, values in found.items()
    ]
    for row in rows:
        print(f"{row['what']}: {row['median']:.3f} {row['unit']} ({row['best']:.3f} to {row['worst']:.3f})")
    if options.record:
        assert options.model == "tiny", "only its times are recorded"
        evidence.record("serve", SOURCES, rows, options.record, on_cpu=True)


async def measure(store: str, model: str) -> dict[str, float]:
    """Returns what one server measured, by what it is."""
    found, begin = {}, time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sebp_edge.serve"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()
    found["ready"] = time.perf_counter() - begin
    found["ready, processor time"] = sum(psutil.Process(process.pid).cpu_times()[:2])
    await Client(process).close()
    async with await Client.start(store=store, folders=[str(NOTES)]) as client:
        await client.call("adapters.list")
        found["memory, idle"] = psutil.Process(client.process.pid).memory_info().rss / 1e6
        for warmth in ("cold", "warm"):
            times = await until_step(client, warmth, model)
            found |= {f"{what}, {warmth}": seconds for what, seconds in times.items()}
        found["first text while a job trains"] = await first_text(client, model)
        found["cancelled, training"] = await ended(client, "warm", "jobs.cancel")
        found["first text, warm"] = await first_text(client, model)
        found["memory, worker"] = (await client.call("status"))["worker"]["memory"] / 1e6
        await until_step(client, "third", model)
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
        found["cancelled, while its worker starts"] = await cancelled_at_start(client, model)
    return found


async def until_step(client: Client, job: str, model: str) -> dict[str, float]:
    """Starts a job; returns when its first event of the worker and its first step were there."""
    begin, times = time.perf_counter(), {}
    await client.call("jobs.start", id=job, params=ADAPT | {"name": job, "model": model})
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


async def ended(client: Client, job: str, method: str) -> float:
    """Cancels or pauses a job at a random moment; returns the seconds until it has."""
    await asyncio.sleep(random.uniform(0, 0.5))
    since = (await client.call("jobs.get", id=job))["job"]["last_event"]
    begin = time.perf_counter()
    await client.call(method, expected_job_id=job)
    async for _ in client.events(job, since):
        pass
    return time.perf_counter() - begin


async def cancelled_at_start(client: Client, model: str) -> float:
    await ended(client, "third", "jobs.cancel")
    await client.call("unload")
    await client.call("jobs.start", id="fourth", params=ADAPT | {"name": "fourth", "model": model})
    return await ended(client, "fourth", "jobs.cancel")


async def first_text(client: Client, model: str) -> float:
    begin, times = time.perf_counter(), []
    params = {"prompt": "The boat", "model": model, "device": "cpu", "max_new_tokens": 2, "temperature": 0}
    await client.call("generate", on_text=lambda text: times.append(time.perf_counter() - begin), **params)
    return times[0]


if __name__ == "__main__":
    main()
