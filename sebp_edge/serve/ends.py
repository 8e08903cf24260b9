"""No process outlives the one that started it.

A supervisor ends with its standard input, with the app's process (known by its number and start time), and is woken by
the kernel when the process that started it ends. A worker ends with its standard input, by the kernel's signal, and
where there is none by looking at its parent.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

from sebp_edge.serve.streams import PIPES
from sebp_edge.serve.windows import JobObject

# Start times that two programs tell of one process may differ so much, in seconds.
_CLOCKS_DIFFER = 2.0


class Parent:
    """A process that this one must not outlive.

    Args:
        pid: its number; by default that of the process that started this one.
        started: when it started, in seconds since 1970. A process that started at another time is another one.
    """

    def __init__(self, pid: int | None = None, started: float | None = None):
        self._process = None
        with suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(os.getppid() if pid is None else pid)
            if started is None or abs(process.create_time() - started) <= _CLOCKS_DIFFER:
                self._process = process

    def is_alive(self) -> bool:
        """Whether it runs. A process that has ended but that nobody has waited for does not."""
        if self._process is None:
            return False
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


class Children:
    """Starts and kills child processes together with their own children. On Windows, see `windows.JobObject`."""

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        """Starts a process in a session of its own, so that Ctrl-C is not for it, with pipes for the protocol."""
        return subprocess.Popen(command, env=environment, start_new_session=True, **PIPES)

    def kill(self, process: subprocess.Popen) -> int:
        """Kills a process and all of its group; returns how it ended: an exit code, or minus the signal."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def children() -> Children | JobObject:
    """Returns what starts and kills processes on this system."""
    if os.name != "nt":
        return Children()
    return JobObject(ctypes.WinDLL("kernel32", use_last_error=True))
