"""Runs the jobs of a benchmark in several processes, since a small model alone leaves most of a GPU idle.

Times of jobs that share the GPU tell nothing.
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
from typing import TypeVar

import torch

Job, Result = TypeVar("Job"), TypeVar("Result")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --processes and --minutes."""
    parser.add_argument("--processes", type=int, default=1, help="jobs that run at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no job is started")


def run(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int, minutes: float) -> Iterator[Result]:
    """Yields the results of jobs, in the order in which they end; prints the error of each job that fails.

    Args:
        function: of a job; picklable, as the jobs are.
        processes: with one, all jobs run in this process.
        minutes: no job is started after so many.

    Raises:
        RuntimeError: after the last result, if jobs have failed or were not started.
    """
    end, done = time.monotonic() + 60 * minutes, 0
    for call in _here(function, jobs, end) if processes == 1 else _in_processes(function, jobs, processes, end):
        try:
            results = call()
        except Exception as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            continue
        done += len(results)
        yield from results
    if done < len(jobs):
        raise RuntimeError(f"{len(jobs) - done} of {len(jobs)} jobs have failed or were not started.")


def _here(function: Callable, jobs: Sequence, end: float) -> Iterator[Callable[[], list]]:
    return (partial(_in_time, function, job, end) for job in jobs)


def _in_processes(function: Callable, jobs: Sequence, processes: int, end: float) -> Iterator[Callable[[], list]]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    # They are forked from one process that has imported torch, and has not used a GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        for future in as_completed([pool.submit(_in_time, function, job, end) for job in jobs]):
            yield future.result


def _in_time(function: Callable, job, end: float) -> list:
    """Returns the result, or nothing after `end` on the monotonic clock, which is the same in all processes."""
    return [function(job)] if time.monotonic() < end else []
