"""Lets OpenMP's threads sleep while they wait for each other, if other programs need the cores too.

GNU's OpenMP spins for milliseconds first. If another program has the core of a thread that is waited for, each wait
takes that program's time slice. OpenMP spins for microseconds only while it has more threads than there are cores, so
threads that do nothing are held as long as the machine is crowded. No result changes.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

# How often it is looked what others use; a call that begins looks sooner.
LOOK_SECONDS, FIRST_SECONDS = 0.25, 0.1
# Cores that others may use beside a thread on each core.
ROOM = 0.3
# Elements that torch computes on with several threads.
_ENOUGH = 2**18


class Crowding:
    """Watches what other programs use of this process's cores.

    Attributes:
        is_crowded: whether they and the threads of the last call have needed more cores than there are.
    """

    def __init__(self):
        self.is_crowded = False

    @contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Context in which threads that compute on `device` sleep while the machine is crowded, if it is the CPU."""
        threads = torch.get_num_threads()
        if device.type != "cpu" or sys.platform != "linux" or threads == 1:
            yield
            return
        ends = threading.Event()
        watch = threading.Thread(target=self._watch, args=(threads, ends), name="sebp-edge crowding", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ends.set()
            watch.join()

    def _watch(self, threads: int, ends: threading.Event) -> None:
        cores = len(os.sched_getaffinity(0))
        number = max(1, math.ceil((cores - threads + 1) / (threads - 1)))
        held: threading.Event | None = None
        seconds, before = FIRST_SECONDS, _used()
        while True:
            if self.is_crowded and held is None:
                held = _hold(number)
            elif not self.is_crowded and held is not None:
                held = held.set()
            if ends.wait(seconds):
                break
            now = _used()
            others = (now[1] - before[1]) / (now[0] - before[0])
            self.is_crowded = others + threads > cores + ROOM
            seconds, before = LOOK_SECONDS, now
        if held is not None:
            held.set()


def _used() -> tuple[float, float]:
    """Returns the time, and the seconds that other processes have used of this process's cores until now."""
    every, own = psutil.cpu_times(percpu=True), os.times()
    total = 0.0
    for times in (every[core] for core in os.sched_getaffinity(0) if core < len(every)):
        total += sum(times[:8]) - times.idle - times.iowait  # guests are users, too
    return time.perf_counter(), total - own.user - own.system


def _hold(number: int) -> threading.Event:
    """Starts so many threads, each of which makes torch start its others; they end once the event is set."""
    end = threading.Event()

    def hold() -> None:
        torch.zeros(_ENOUGH).add_(1)
        end.wait()

    for _ in range(number):
        threading.Thread(target=hold, name="sebp-edge holds threads", daemon=True).start()
    return end
