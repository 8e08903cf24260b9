"""Runs the jobs of a benchmark in several processes, since a small model alone leaves most of a GPU idle.

The first job runs alone, so that its time can be recorded; times of jobs that share the GPU tell nothing.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

import torch


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --processes and --minutes."""
    parser.add_argument("--processes", type=int, default=1, help="jobs that run at once, after the first")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no job is started")


def run(function: Callable, jobs: Sequence, processes: int, minutes: float) -> Iterator[tuple[object, int]]:
    """Yields the result of each job, in the order in which they end, and how many jobs ran at once.

    Args:
        function: of a job; picklable, as the jobs are.
        processes: with one, all jobs run in this process.

    Raises:
        RuntimeError: after the last result, if jobs have failed, which was printed, or were not started.
    """
    end, done = time.monotonic() + 60 * minutes, 0
    for result in _alone(function, jobs, end) if processes == 1 else _at_once(function, jobs, processes, end):
        done += 1
        yield result
    if done < len(jobs):
        raise RuntimeError(f"{len(jobs) - done} of {len(jobs)} jobs have failed or were not started.")


def _alone(function: Callable, jobs: Sequence, end: float) -> Iterator[tuple[object, int]]:
    for job in jobs:
        yield from _results(partial(_in_time, function, job, end), 1)


def _at_once(function: Callable, jobs: Sequence, processes: int, end: float) -> Iterator[tuple[object, int]]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        for at_once, some in ((1, jobs[:1]), (processes, jobs[1:])):
            for future in as_completed([pool.submit(_in_time, function, job, end) for job in some]):
                yield from _results(future.result, at_once)


def _results(call: Callable[[], list], at_once: int) -> Iterator[tuple[object, int]]:
    try:
        results = call()
    except Exception as error:
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        return
    yield from ((result, at_once) for result in results)


def _in_time(function: Callable, job, end: float) -> list:
    """Returns the result, or nothing after `end` on the monotonic clock, which is the same in all processes."""
    return [function(job)] if time.monotonic() < end else []
