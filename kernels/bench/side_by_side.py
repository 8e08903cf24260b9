"""Runs the jobs of a benchmark in several processes, since a small model alone leaves most of a GPU idle.

Times of jobs that share the GPU tell nothing.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

Job, Result = TypeVar("Job"), TypeVar("Result")


def run(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    """Yields the results of jobs, in the order in which they end; prints the error of each job that fails.

    Args:
        function: of a job; picklable, as the jobs are.
        processes: with one, all jobs run in this process.

    Raises:
        RuntimeError: after the last result, if jobs have failed.
    """
    failed = 0
    calls = (partial(function, job) for job in jobs) if processes == 1 else _in_processes(function, jobs, processes)
    for call in calls:
        try:
            result = call()
        except Exception as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            failed += 1
            continue
        yield result
    if failed:
        raise RuntimeError(f"{failed} of {len(jobs)} jobs have failed.")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `run_missing` reads, and the device of its jobs."""
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1, help="jobs that run at once")
    parser.add_argument("--outcomes", type=Path, help="a file with a line for each job; goes on where it ends")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further job begins")


def run_missing(
    function: Callable[[Job], Result], jobs: Sequence[Job], options: argparse.Namespace
) -> dict[Job, Result]:
    """Returns the results of jobs, as far as they are in the file of outcomes or were run in time.

    Args:
        jobs: known in the file by their repr. The results must be what JSON keeps.
    """
    file, end = options.outcomes, time.time() + 60 * options.minutes
    lines = file.read_text().splitlines() if file and file.exists() else []
    known = dict(map(json.loads, lines))
    found = {job: known[repr(job)] for job in jobs if repr(job) in known}
    left = [job for job in jobs if job not in found]
    for job, *results in run(partial(_run_in_time, function, end), left, options.processes):
        for found[job] in results:
            if file:
                with file.open("a") as appended:
                    print(json.dumps([repr(job), found[job]]), file=appended)
    return found


def _run_in_time(function: Callable[[Job], Result], end: float, job: Job) -> tuple:
    return (job, function(job)) if time.time() < end else (job,)


def _in_processes(function: Callable, jobs: Sequence, processes: int) -> Iterator[Callable[[], object]]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    # They are forked from one process that has imported torch, and has not used a GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result
