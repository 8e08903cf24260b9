"""No process outlives the one that started it.

A supervisor ends with its standard input, with the app's process (known by its number and start time), and is woken by
the kernel when the process that started it ends. A worker ends with its standard input, by the kernel's signal, and
where there is none by looking at its parent.
"""

import sys
from contextlib import suppress

import psutil

# Start times that two programs tell of one process may differ so much, in seconds.
_CLOCKS_DIFFER = 2.0


class Parent:
    """A process that this one must not outlive.

    Args:
        pid: its number; 0 if it is outside of this container, None if it has ended.
        started: when it started, in seconds since 1970; by default before this process. A process that started at
            another time is another one.
    """

    def __init__(self, pid: int | None, started: float | None = None):
        self._process, self._is_outside = None, pid == 0
        if not pid:
            return
        with suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(pid)
            begun, own = process.create_time(), psutil.Process().create_time()
            if begun <= own if started is None else abs(begun - started) <= _CLOCKS_DIFFER:
                self._process = process

    def is_alive(self) -> bool:
        """Whether it runs. One that has ended but that nobody has waited for does not; one outside tells nothing."""
        if self._process is None:
            return self._is_outside
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def command_of(flag: str, module: str) -> list[str]:
    """Returns the command of a process of ours. A frozen app becomes it by a flag: see sebp_edge/cli/frozen/rthooks."""
    if getattr(sys, "frozen", False):
        return [sys.executable, f"--sebp-edge-{flag}"]
    # Without the current folder, which may hold anything.
    return [sys.executable, "-P", "-m", f"sebp_edge.serve.{module}"]
