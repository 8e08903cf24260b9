"""Runs the processes of peers.py: all import at once, which takes longest; then one after the other measures alone.

A process that waits takes nothing but memory, about half a gigabyte of the host's.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from speed.trainers.work import Job

# What a process says when everything is imported.
IMPORTED = "imported"
# The module of a process, and the folder in which it is found.
PROCESS, BENCH = ("-m", "speed.trainers.process"), Path(__file__).parents[2]
# A trainer that hangs is stopped after this time, so that the others can run.
ARM_SECONDS = 240
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "WANDB_DISABLED": "true",
}


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        rows: what it measured.
        error: how it ended, and its last line of errors.
    """

    succeeded: bool
    rows: list[dict]
    error: str


def run_in_turn(work: list[tuple[str, Job]]) -> Iterator[Ended]:
    """Runs the processes of these arms and jobs in order, and yields how each ended."""
    with ExitStack() as started:
        processes = [started.enter_context(_Process(*each)) for each in work]
        for process in processes:
            process.wait()
        for process in processes:
            process.go_on()
            yield process.end()


class _Process:
    """The process of one arm; leaving its context ends it."""

    def __init__(self, name: str, job: Job):
        paths = (str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *PROCESS, name, json.dumps(asdict(job))],
            # In the job's folder, because Unsloth writes into the current folder.
            cwd=job.folder,
            env=os.environ | QUIET | {"PYTHONPATH": os.pathsep.join([str(BENCH), *paths])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._said: list[str] = []
        self._hung = False

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        # Reads what is left, closes the pipes and waits.
        self._process.communicate()
        self._errors.close()

    def wait(self) -> None:
        """Waits until it has imported what it needs, or has ended."""
        self._listen(IMPORTED)

    def go_on(self) -> None:
        """Lets it go on, unless it has ended."""
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> Ended:
        """Waits until it has ended."""
        self._listen()
        code = self._process.wait()
        ending = f"stopped after {ARM_SECONDS} s" if self._hung else f"ended with code {code}"
        self._errors.seek(0)
        last = [each.strip() for each in self._errors if each.strip()][-1:]
        rows = [json.loads(each) for each in self._said if each.startswith('{"texts"')]
        return Ended(code == 0, rows, ": ".join([ending, *last])[:200])

    def _listen(self, until: str | None = None) -> None:
        """Reads what it says, up to the word `until`."""
        timer = threading.Timer(ARM_SECONDS, self._stop)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.strip() == until:
                    return
                self._said.append(line)
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self._hung = True
        self._process.kill()
