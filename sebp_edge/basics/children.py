"""Starts other programs so that none outlives this process, however that ends.

On Windows, they are in a job object: tested with a stand-in, it has never run there.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

from sebp_edge.basics import parents
from sebp_edge.errors import MachineError

_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_KILL_ON_CLOSE = 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
_KILLED = 1
# The options of a child that is spoken with through its standard streams.
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
_NEW_GROUP_WITHOUT_WINDOW = 0x08000200  # CREATE_NO_WINDOW | CREATE_NEW_PROCESS_GROUP


class ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION, which begins with a JOBOBJECT_BASIC_LIMIT_INFORMATION."""

    _fields_ = [
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", ctypes.c_uint32),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", ctypes.c_uint32),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", ctypes.c_uint32),
        ("SchedulingClass", ctypes.c_uint32),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    ]


class JobObject:
    """Has the interface of `Children`. With this process its handle is closed, and all in it end."""

    def __init__(self, kernel32):
        self._kernel32 = kernel32
        self._kernel32.CreateJobObjectW.restype = ctypes.c_void_p
        self._job = self._make()

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Starts a process in the job; its own children are in it too."""
        if hasattr(subprocess, "STARTUPINFO"):
            options["creationflags"] = _NEW_GROUP_WITHOUT_WINDOW
        process = subprocess.Popen(command, **options)
        handle = ctypes.c_void_p(int(getattr(process, "_handle", 0)))
        if not self._kernel32.AssignProcessToJobObject(self._job, handle):
            process.kill()
            process.wait()
            raise MachineError(
                "Windows refuses to put a child process into a job object, which might outlive this one."
            )
        return process

    def kill(self, process: subprocess.Popen) -> int:
        """Kills all in the job, and makes another one for the next process."""
        self._kernel32.TerminateJobObject(self._job, _KILLED)
        self._kernel32.CloseHandle(self._job)
        self._job = self._make()
        return process.wait()

    def _make(self) -> ctypes.c_void_p:
        job = ctypes.c_void_p(self._kernel32.CreateJobObjectW(None, None))
        limits = ExtendedLimits()
        limits.LimitFlags = _KILL_ON_CLOSE
        size = ctypes.sizeof(limits)
        if not job or not self._kernel32.SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), size):
            raise MachineError("Windows refuses to make a job object, so a child might outlive this program.")
        return job


class Children:
    """Starts and kills child processes together with their own children. On Windows, see `JobObject`."""

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
