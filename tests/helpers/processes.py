"""Runs functions in several processes at once, which form a process group of torch.distributed."""

import gc
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
from command import start
from torch import distributed

# Longer than any check, so that processes that wait for each other fail a test instead of hanging it.
TIMEOUT = 120
# The pipe is the standard input.
CODE = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(0)
sys.path[:] = pipe.recv()
from processes import serve
serve(pipe, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


class Processes:
    """Processes that stay, so that they import torch once; a context manager.

    Args:
        count: the number of processes.
        backend: "gloo" on the CPU, "nccl" on as many GPUs as processes.
    """

    def __init__(self, count: int = 2, backend: str = "gloo"):
        self.count, self.backend = count, backend
        self._processes, self._pipes = [], []

    def run(self, check, *arguments) -> None:
        """Calls `check(rank, *arguments)` in each process, in a new process group.

        Raises:
            AssertionError: a process failed or did not end in time; contains its traceback.
        """
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((check, arguments, f"file://{folder}/rendezvous"))
            failures = [self._failure(pipe) for pipe in self._pipes]
        if any(failures):
            # The others may still wait for the one that failed.
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures)))

    def _start(self) -> None:
        for rank in range(self.count):
            ours, theirs = Pipe()
            self._processes.append(
                start([CODE, rank, self.count, self.backend], stdin=theirs.fileno(), stdout=None, stderr=None)
            )
            self._pipes.append(ours)
            theirs.close()
            ours.send(sys.path)

    def _failure(self, pipe) -> str | None:
        try:
            return pipe.recv() if pipe.poll(TIMEOUT) else "did not end in time"
        except EOFError:
            return "died"

    def stop(self) -> None:
        """Ends the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exception) -> None:
        self.stop()


def serve(pipe: Connection, rank: int, count: int, backend: str) -> None:
    """Runs what comes through the pipe, until this process is ended."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    while True:
        check, arguments, rendezvous = pipe.recv()
        try:
            with process_group(rendezvous, rank, count, backend):
                check(rank, *arguments)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)


@contextmanager
def process_group(rendezvous: str, rank: int = 0, count: int = 1, backend: str = "gloo") -> Iterator[None]:
    """Context with a process group; `rendezvous` is the URL of a file."""
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=count)
    try:
        yield
        distributed.barrier()
    finally:
        # Models may hold on to the group, whose threads would abort the process if it ended before them.
        gc.collect()
        distributed.destroy_process_group()
