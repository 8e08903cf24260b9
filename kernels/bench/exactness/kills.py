"""Kills the app, the server or the worker of `sebp-edge serve` at random moments, and looks at what is left.

    python kernels/bench/exactness/kills.py [--number 200] [--of app server worker] [--seed 0] [--record [FILE]]

An app starts a server and a training of the example notes with "tiny" on the CPU. At a random moment, before or after
torch is imported or between any two events, one of the three gets SIGKILL. Three seconds later no process of them may
be left (after the worker's end, the server stays and answers). Then the next server must show the job as interrupted,
and as one that can go on if steps of it were saved. The script ends with 1 if anything else was found.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import AdapterStore
from sebp_edge.serve.client import Client

NOTES = Path(__file__).parents[3] / "examples" / "notes"
SOURCES = ("sebp_edge/serve", __file__)
JOB = {"paths": [str(NOTES)], "device": "cpu", "name": "notes"}
MAX_SECONDS, MOST_EVENTS = 3.0, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--of", nargs="+", default=["app", "server", "worker"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--app", help=argparse.SUPPRESS)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    if options.app:
        asyncio.run(app(options.app))
        return
    draw, rows = random.Random(options.seed), []
    for victim in options.of:
        row = {"killed": victim, "kills": 0, "before_first_event": 0, "left": 0, "not_shown": 0, "resumable": 0}
        row["slowest_end"] = 0.0
        for _ in range(options.number):
            with tempfile.TemporaryDirectory() as store:
                kill_once(victim, store, draw, row)
            print(row, flush=True)
        rows.append(row)
    if options.record:
        evidence.record("kills", SOURCES, rows, options.record, on_cpu=True)
    sys.exit(any(row["left"] or row["not_shown"] for row in rows))


async def app(store: str) -> None:
    """The app: prints the server's process number, then a line for each event; ends once its job has."""
    client = await Client.start(store=store, folders=[str(NOTES)])
    print(client.process.pid, flush=True)
    await client.call("jobs.start", id="job", params=JOB)
    print("started", flush=True)
    async for event in client.events("job"):
        print(event["event"].get("state", "event"), flush=True)
    await client.call("ping")
    print("answers", flush=True)
    await asyncio.sleep(1000)


def kill_once(victim: str, store: str, draw: random.Random, row: dict) -> None:
    """Kills one process at a random moment, and counts in `row` what is found."""
    command = [sys.executable, __file__, "--app", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as process:
        server = int(process.stdout.readline())
        process.stdout.readline()
        events = draw.choice([0, draw.randrange(3, MOST_EVENTS)])
        for _ in range(events):
            process.stdout.readline()
        time.sleep(draw.uniform(0, 0.3 if events else 5.0))
        below = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]
        row["kills"] += 1
        row["before_first_event"] += not events
        targets = {"app": process.pid, "server": server}
        if victim == "worker":
            targets["worker"] = below[1].pid
            below = below[1:]
        begin = time.monotonic()
        os.kill(targets[victim], signal.SIGKILL)
        while any(map(runs, below)) and time.monotonic() < begin + MAX_SECONDS:
            time.sleep(0.005)
        row["slowest_end"] = max(row["slowest_end"], time.monotonic() - begin)
        row["left"] += any(map(runs, below))
        if victim == "worker":
            lines = [line.strip() for line in iter(process.stdout.readline, "answers\n")]
            row["not_shown"] += "interrupted" not in lines
        process.kill()
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    while runs(psutil.Process(server)) if psutil.pid_exists(server) else False:
        time.sleep(0.01)
    job = asyncio.run(shown(store))
    saved = [job for job in AdapterStore(store).jobs.list() if job.has_checkpoint]
    row["not_shown"] += job["state"] not in ("interrupted", "paused") or (bool(saved) and not job["resumable"])
    row["resumable"] += job["resumable"]


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def shown(store: str) -> dict:
    """Returns the job as the next server shows it."""
    async with await Client.start(store=store, folders=[str(NOTES)]) as client:
        return (await client.call("jobs.get", id="job"))["job"]


if __name__ == "__main__":
    main()
