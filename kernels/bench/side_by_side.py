"""Runs the jobs of a benchmark in several processes, since a small model alone leaves most of a GPU idle.

Times of jobs that share the GPU tell nothing.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
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


def _in_processes(function: Callable, jobs: Sequence, processes: int) -> Iterator[Callable[[], object]]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    # They are forked from one process that has imported torch, and has not used a GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result
