"""Kills the app, the server or the worker of `sebp-edge serve` at random moments, and looks at what is left.

    python kernels/bench/exactness/kills.py [--number 200] [--at-once 1] [--outcomes FILE] [--record [FILE]]

An app starts a server and a short training on the CPU. At a random moment, after some seconds of its processor time or
some events of its job, so that the load of the machine does not matter, one of these happens:

    app, server, worker     this process gets SIGKILL
    input                   the app closes the server's input, and kills the server 2 s later, as MCP's client does
    inherited               the app gets SIGKILL, and another process still has its end of the server's input
    reused                  the process that `initialize` named as the app ends, and another one gets its number

Then all processes that the app had started must end within 3 s (after the worker's end: the worker and its children,
and the server answers). The next server must show the job as interrupted, and as one that can go on if its state was
saved, which must be readable. Waiting goes on for a minute: what ends between is late, which the table tells; what has
not ended then, and a job that is not shown or not readable, makes the script end with 1.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.errors import SebpEdgeError
from sebp_edge.serve.client import Client
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.model_reference import BUNDLED_FOLDER

SOURCES = ("sebp_edge/serve", "sebp_edge/basics/children.py", "sebp_edge/basics/parents.py", __file__)
KILLED, FEWER = ("app", "server", "worker"), ("input", "inherited", "reused")
RECIPE = "r = 4\nlearning_rate = 1e-2\nepochs = 40\nbatch_tokens = 200\ncontext_length = 64\n"
WORDS = ("the ", "pump ", "in ", "our ", "garden ", "needs ", "new ", "oil ")
MAX_SECONDS, PATIENCE = 3.0, 60.0
# Each process of an app has this in its environment.
MARK = "SEBP_EDGE_KILLS"
# Of the moments, so many are before the worker runs the job: most of them while it imports torch.
EARLY = 0.3


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--number", type=int, default=200, help="of app, server and worker; a tenth of the others")
    parser.add_argument("--at-once", type=int, default=1, help="apps that run at once")
    parser.add_argument("--outcomes", type=Path, help="a file with a line for each kill; goes on where it ends")
    parser.add_argument("--app", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.app:
        asyncio.run(app(Path(options.app[0]), json.loads(options.app[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = options.outcomes or Path(folder, "outcomes")
        run_all(Path(folder), options.number, options.at_once, file)
        rows = [row_of(cause, outcomes_in(file)[cause]) for cause in (*KILLED, *FEWER)]
    print(*rows, sep="\n")
    evidence.record("kills", SOURCES, rows, options.record, on_cpu=True)
    sys.exit(any(row["stayed"] or row["wrong"] for row in rows))


def run_all(folder: Path, number: int, at_once: int, file: Path) -> None:
    """Runs what `file` does not have yet, in turns; a stop by Ctrl-C keeps what is done."""
    done, writing = outcomes_in(file), threading.Lock()
    wanted = {cause: number if cause in KILLED else max(1, number // 10) for cause in (*KILLED, *FEWER)}
    left = {cause: wanted[cause] - len(done[cause]) for cause in wanted}
    causes = [cause for turn in range(number) for cause in left if turn < left[cause]]
    if not causes:
        return
    make_model(folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "notes").mkdir()
    for note in range(12):
        text = f"Note {note}: " + "".join(random.Random(note).choices(WORDS, k=40))
        (folder / "notes" / f"{note}.md").write_text(text)
    moments = measure(folder)
    print(f"The job runs after {moments[0]:.1f} s of processor time, and has {moments[1]} events.", flush=True)

    def one(cause: str) -> None:
        outcome = App(folder, moments).end_by(cause)
        with writing, file.open("a") as lines:
            print(json.dumps(outcome), file=lines)
        print(outcome, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            for each in [pool.submit(one, cause) for cause in causes]:
                each.result()
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise


def make_model(folder: Path) -> None:
    """Saves a small random Llama, so that most of a job's time is not that of its products."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from models import TINY

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=len(tokenizer))).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- the app


async def app(folder: Path, settings: dict) -> None:
    """The app: prints the server's process number and what its job does; ends the server once its own input ends."""
    folders = [str(folder)]
    client = await Client.start(folders=folders, **settings)
    if os.environ[MARK].startswith("inherited") and os.fork() == 0:
        signal.pause()
    print(client.process.pid, flush=True)
    ending = asyncio.create_task(end_as_mcp_does(client))
    job = {"paths": [str(folder / "notes")], "model": str(folder / "model"), "recipe": str(folder / "recipe.toml")}
    await client.call("jobs.start", id="job", params=job | {"device": "cpu", "name": "notes"})
    async for event in client.events("job"):
        print(event["event"].get("state", "event"), flush=True)
    await client.call("ping")
    print("answers", flush=True)
    await ending


async def end_as_mcp_does(client: Client) -> None:
    """Closes the server's input once there is nothing to read, and kills it 2 s later."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    client.process.stdin.close()
    await asyncio.sleep(2)
    with contextlib.suppress(ProcessLookupError):
        client.process.kill()


class App:
    """A running app with a server, from outside."""

    def __init__(self, folder: Path, moments: tuple[float, int]):
        self._folder, self._moments, self._draw = folder, moments, random.SystemRandom()
        self._lines: list[str] = []

    def start(self, cause: str, store: str, **settings) -> None:
        """Starts the app, and a thread that reads what it prints."""
        self.mark = f"{cause}-{self._draw.getrandbits(64)}"
        command = [sys.executable, __file__, "--app", str(self._folder), json.dumps({"store": store, **settings})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | {MARK: self.mark}, **pipes)
        threading.Thread(target=lambda: self._lines.extend(map(str.strip, self.process.stdout)), daemon=True).start()

    def processes(self) -> list[psutil.Process]:
        """Returns the processes that run and have the app's mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and runs(process):
                    found.append(process)
        return found

    def seconds(self) -> float:
        """Returns the processor time of all of them."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def wait_for(self, *lines: str, until: float = math.inf) -> None:
        """Waits until the app has printed one of these lines or has ended, or until a time of `time.monotonic`."""
        while not set(lines) & set(self._lines) and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)

    def end_by(self, cause: str) -> dict:
        """Runs an app up to a random moment, ends it in one way, and returns what is found."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
            is_early = self._draw.random() < EARLY
            self.parent = subprocess.Popen(["sleep", "1000"])
            named = {"pid": self.parent.pid, "started": psutil.Process(self.parent.pid).create_time()}
            self.start(cause, store, **({"parent": named} if cause == "reused" else {}))
            try:
                self._wait_for_a_moment(is_early)
                outcome = self._end(cause)
                outcome |= {"is_early": is_early, "load": round(os.getloadavg()[0], 1)}
            finally:
                self.parent.kill()
                self.process.kill()
                for each in self.processes():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                self.parent.wait()
                self.process.wait()
            while self.processes():
                time.sleep(0.02)
            return outcome | asyncio.run(self._found_by_the_next_server(cause, store))

    def _wait_for_a_moment(self, is_early: bool) -> None:
        seconds, lines = self._moments
        while not self._lines and self.process.poll() is None:
            time.sleep(0.02)
        if is_early:
            end = self._draw.uniform(0, seconds)
            while "running" not in self._lines and self.seconds() < end:
                time.sleep(0.25)
        else:
            end = self._draw.randrange(lines)
            self.wait_for("running", "answers")
            while "answers" not in self._lines and len(self._lines) < end and self.process.poll() is None:
                time.sleep(0.005)
        time.sleep(self._draw.uniform(0, 0.25))

    def _end(self, cause: str) -> dict:
        server, stays = int(self._lines[0]), {self.process.pid}
        below = psutil.Process(server).children()
        if cause == "worker":
            while not (below := psutil.Process(server).children()):
                time.sleep(0.01)
            stays.add(server)
        if cause == "inherited":
            stays.update(each.pid for each in psutil.Process(self.process.pid).children() if each.pid != server)
        watched, begin = self.processes(), time.monotonic()
        match cause:
            case "app" | "inherited":
                self.process.kill()
            case "server":
                os.kill(server, signal.SIGKILL)
            case "worker":
                os.kill(below[0].pid, signal.SIGKILL)
            case "input":
                self.process.stdin.close()
            case "reused":
                self.parent = give_its_number_to_another(self.parent, server)
                begin = time.monotonic()
        while (left := [each for each in watched if each.pid not in stays]) and time.monotonic() < begin + PATIENCE:
            watched = [each for each in left if runs(each)] or self.processes()
            time.sleep(0.01)
        seconds = time.monotonic() - begin
        answers = True
        if cause == "worker":
            self.wait_for("answers", until=time.monotonic() + PATIENCE)
            answers = "answers" in self._lines
        return {"cause": cause, "seconds": seconds, "stayed": len(left), "answers": answers}

    async def _found_by_the_next_server(self, cause: str, store: str) -> dict:
        """Returns what the next server and the store say of the job."""
        from sebp_edge.run.adaptation_job import AdaptationJob  # imports torch, which an app does not

        async with await Client.start(store=store, folders=[str(self._folder)]) as client:
            jobs = (await client.call("jobs.list"))["jobs"]
            unreadable = (await client.call("adapters.list"))["unreadable"]
        opened, saved, readable = AdapterStore(store), 0, not unreadable
        for job in opened.jobs.list():
            saved += job.has_checkpoint
            try:
                AdaptationJob(opened, job)
            except SebpEdgeError as error:
                readable = False
                print(error, flush=True)
        state, resumable = (jobs[0]["state"], jobs[0]["resumable"]) if jobs else ("none", False)
        # Killed before the job was told, or after its end, it is not interrupted.
        allowed = {"done"} if "done" in self._lines else {"interrupted", "paused", "done"}
        shown = state in allowed if jobs else not set(self._lines) & {"queued", "starting", "running"}
        found = {"state": state, "shown": shown and not (saved and not resumable), "resumable": resumable}
        return found | {"saved": saved, "readable": readable}


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def give_its_number_to_another(process: subprocess.Popen, server: int) -> subprocess.Popen:
    """Ends a process, and starts another one with its number while the server is stopped."""
    os.kill(server, signal.SIGSTOP)
    try:
        process.kill()
        process.wait()
        for _ in range(1000):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(process.pid - 1))  # needs root
            other = subprocess.Popen(["sleep", "1000"])
            if other.pid == process.pid:
                return other
            other.kill()
            other.wait()
        raise RuntimeError("Other processes start so often that the number cannot be given to a chosen one.")
    finally:
        os.kill(server, signal.SIGCONT)


def measure(folder: Path) -> tuple[float, int]:
    """Returns the processor time until a job runs, and how many lines the app prints until it is done."""
    one = App(folder, (0, 0))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        one.start("none", store)
        one.wait_for("running", "answers")
        seconds = one.seconds()
        one.wait_for("answers")
        one.process.stdin.close()
        one.process.wait()
    assert "done" in one._lines, one._lines
    return seconds, len(one._lines)


# --------------------------------------------------------------------------------------------------------- the outcomes


def outcomes_in(file: Path) -> dict[str, list[dict]]:
    """Returns the outcomes that a file has, by their cause."""
    outcomes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {cause: [each for each in outcomes if each["cause"] == cause] for cause in (*KILLED, *FEWER)}


def row_of(cause: str, outcomes: list[dict]) -> dict:
    """Returns what was found after one kind of end."""
    seconds = sorted(each["seconds"] for each in outcomes) or [0.0]
    return {
        "cause": cause,
        "times": len(outcomes),
        "before_it_ran": sum(each["is_early"] for each in outcomes),
        "late": sum(each["seconds"] > MAX_SECONDS for each in outcomes),
        "stayed": sum(each["stayed"] > 0 for each in outcomes),
        "wrong": sum(not (each["shown"] and each["readable"] and each["answers"]) for each in outcomes),
        "resumable": sum(each["resumable"] for each in outcomes),
        "median": statistics.median(seconds),
        "p95": seconds[int(0.95 * (len(seconds) - 1))],
        "worst": seconds[-1],
        "load": statistics.median([each["load"] for each in outcomes] or [0.0]),
    }


if __name__ == "__main__":
    main()
