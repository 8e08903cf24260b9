"""Starts other programs so that none outlives this process, however that ends."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

from sebp_edge.basics import parents
from sebp_edge.basics.job_object import JobObject


class Children:
    """Starts and kills child processes together with their own children. On Windows, see `job_object.JobObject`."""

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Starts a process in a session of its own, so that Ctrl-C is not for it; options are those of `Popen`.

        A program of somebody else's needs `ending_with_this`; one of ours calls `parents.end_with_parent`.
        """
        return subprocess.Popen(command, start_new_session=True, **options)

    def kill(self, process: subprocess.Popen) -> int:
        """Kills a process and all of its group; returns how it ended: an exit code, or minus the signal."""
        if process.returncode is None:  # until it is waited for, no other group can have its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def children() -> Children | JobObject:
    """Returns what starts and kills processes on this system."""
    if os.name != "nt":
        return Children()
    return JobObject(ctypes.WinDLL("kernel32", use_last_error=True))


def ending_with_this(command: list[str]) -> list[str]:
    """Returns a command that runs another one, which ends when the thread that starts it, or this process, ends.

    No code runs between fork and exec for it: a new Python asks for the kernel's signal, and becomes the program.
    """
    if os.name == "nt":  # a job object ends it
        return command
    frozen = getattr(sys, "frozen", False)
    ours = ["--sebp-edge-runs"] if frozen else ["-I", "-S", parents.__file__]
    return [sys.executable, *ours, str(os.getpid()), *command]
