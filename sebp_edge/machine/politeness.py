"""How a training gives way to other programs on this machine. Imports no torch."""

import ctypes
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from sebp_edge.errors import MachineError, OptionError

# What is added to the niceness of a process of low priority; of two busy processes it gets about a tenth.
NICENESS = 10
_MIN_SHARE, _MAX_THREADS = 5, 1024
# The niceness of a session: Linux desktops share the processor between sessions, and then within each.
_SESSION = Path("/proc/self/autogroup")
# Others have taken the GPU once they used this much of it, in percent, for so many seconds; until they use less for
# longer. Desktops that draw windows and videos stay below.
TAKEN, TAKEN_SECONDS, LEFT_SECONDS = 25, 3.0, 10.0
# NVML's error if nothing was sampled: no process has computed since.
_NOT_FOUND = 6
# Linux's namespace of processes, and its name outside of containers. Inside, the driver tells foreign process numbers.
NAMESPACE, _OUTSIDE = Path("/proc/self/ns/pid"), "pid:[4026531836]"
_MAX_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True)
class Politeness:
    """How a training gives way to other programs.

    Attributes:
        threads: how many threads compute on the CPU; None leaves that to torch. Another number rounds differently.
        gpu_share: the most of its time that it computes on the GPU, in percent.
        waits: whether it waits while the machine is on battery power, or other programs need the memory or the GPU.

    Raises:
        OptionError: a value is out of range.
    """

    threads: int | None = None
    gpu_share: int = 100
    waits: bool = False

    def __post_init__(self):
        for name, value, least, most in (
            ("threads", 1 if self.threads is None else self.threads, 1, _MAX_THREADS),
            ("gpu_share", self.gpu_share, _MIN_SHARE, 100),
        ):
            if type(value) is not int or not least <= value <= most:
                raise OptionError(f"{name} is {value!r}; choose a whole number from {least} to {most}.")

    def on(self, device: str) -> "Politeness":
        """Returns it for a training on "cuda", "mps" or "cpu".

        Raises:
            OptionError: the share of a GPU is limited, but the training runs on the CPU.
        """
        if device == "cpu" and self.gpu_share < 100:
            raise OptionError(
                f"The GPU's share is {self.gpu_share} %, but the training runs on the CPU; limit its threads instead: "
                "--threads N (threads=)."
            )
        return self

    @classmethod
    def of(cls, polite: bool = False, threads: int | None = None, gpu_share: int | None = None) -> "Politeness":
        """Returns what the options --polite, --threads and --gpu-share ask for together."""
        if polite and threads is None:
            threads = max(1, _cores() // 2)
        return cls(threads=threads, gpu_share=100 if gpu_share is None else gpu_share, waits=polite)


def lower_priority() -> None:
    """Gives this process and its later children a low priority, for good: Linux lets nobody undo that."""
    if sys.platform == "win32":
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        return
    # On Linux each thread has a niceness of its own, and new threads inherit it.
    threads = [thread.id for thread in psutil.Process().threads()] if sys.platform == "linux" else [0]
    for thread in threads:
        _lower(thread)
    set_session_niceness(NICENESS)


def lower_priority_of_thread() -> None:
    """Gives this thread, and those that it starts, a low priority, for good.

    Where only processes have a priority, gives it to this process.
    """
    if sys.platform == "linux":
        _lower(threading.get_native_id())
    else:
        lower_priority()


def set_session_niceness(niceness: int) -> None:
    """Sets the niceness of this process's session if it leads one: Linux takes that back, up to ten times a second."""
    if os.name == "nt" or os.getsid(0) != os.getpid():  # it is the terminal's, where other programs run
        return
    for _ in range(3):
        try:
            _SESSION.write_text(f"{niceness}\n")
        except BlockingIOError:  # asked again too soon
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def _lower(thread: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def is_on_battery() -> bool:
    """Whether this machine runs on battery power; False if it has no battery, or does not tell."""
    try:
        sensors = psutil.sensors_battery()  # which some systems lack; others have no power supplies in /sys
    except (AttributeError, OSError):
        return False
    return sensors is not None and sensors.power_plugged is False


class _Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: shares are in percent, the time is in microseconds."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("time", ctypes.c_ulonglong),
        *((name, ctypes.c_uint) for name in ("compute", "memory", "encoder", "decoder")),
    ]


class GpuUse:
    """Watches what other processes compute on an NVIDIA GPU, as its driver's library NVML tells it."""

    def __init__(self, uuid: str, namespace: Path = NAMESPACE):
        if namespace.is_symlink() and str(namespace.readlink()) != _OUTSIDE:
            raise MachineError("In a container, the driver does not tell which process uses the GPU.")
        try:
            self._nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
            self._device, self._seen = ctypes.c_void_p(), 0
            self._call("nvmlInit_v2")
            self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._device))
            self.by_others()
        except (OSError, AttributeError) as error:
            raise MachineError("The GPU's driver lacks NVML, which tells what uses the GPU.") from error
        self._is_taken, self._since = False, time.monotonic()

    @property
    def is_taken(self) -> bool:
        """Whether others use it: for some seconds already, and then until they have left it alone for some."""
        now, is_used = time.monotonic(), self.by_others() >= TAKEN
        if is_used == self._is_taken:
            self._since = now
        elif now - self._since >= (LEFT_SECONDS if self._is_taken else TAKEN_SECONDS):
            self._is_taken, self._since = is_used, now
        return self._is_taken

    def by_others(self) -> float:
        """Returns how much others have computed since the last call, in percent of the GPU."""
        samples, count = (_Sample * _MAX_SAMPLES)(), ctypes.c_uint(_MAX_SAMPLES)
        read, since = "nvmlDeviceGetProcessUtilization", ctypes.c_ulonglong(self._seen)
        if self._call(read, self._device, samples, ctypes.byref(count), since, expects=_NOT_FOUND) == _NOT_FOUND:
            return 0.0
        shares = defaultdict(list)
        for sample in samples[: count.value]:
            self._seen = max(self._seen, sample.time)
            if sample.pid != os.getpid():
                shares[sample.pid].append(sample.compute)
        return sum(sum(each) / len(each) for each in shares.values())

    def _call(self, name: str, *args, expects: int = 0) -> int:
        code = getattr(self._nvml, name)(*args)
        if code not in (0, expects):
            raise MachineError(f"The GPU's driver does not tell what uses the GPU ({name}: error {code}).")
        return code


def _cores() -> int:
    """Returns how many cores this process may use; two threads of one core count as one."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(here, psutil.cpu_count(logical=False) or here)
