"""What other processes compute on an NVIDIA GPU, as its driver's library NVML tells it. Imports no torch."""

import ctypes
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from sebp_edge.errors import MachineError

# Others have taken the GPU once they used this much of it, in percent, for so many seconds; until they use less for
# longer. Desktops that draw windows and videos stay below.
TAKEN, TAKEN_SECONDS, LEFT_SECONDS = 25, 3.0, 10.0
# NVML's error if nothing was sampled: no process has computed since.
_NOT_FOUND = 6
# Linux's namespace of processes, and its name outside of containers. Inside, the driver tells foreign process numbers.
NAMESPACE, _OUTSIDE = Path("/proc/self/ns/pid"), "pid:[4026531836]"
_MAX_SAMPLES = 1024


class _Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: shares are in percent, the time is in microseconds."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("time", ctypes.c_ulonglong),
        *((name, ctypes.c_uint) for name in ("compute", "memory", "encoder", "decoder")),
    ]


class GpuUse:
    """Watches what other processes compute on a GPU.

    Raises:
        MachineError: the driver does not tell it.
    """

    def __init__(self, uuid: str, namespace: Path = NAMESPACE, clock: Callable[[], float] = time.monotonic):
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
        self._clock, self._is_taken, self._since = clock, False, clock()

    @property
    def is_taken(self) -> bool:
        """Whether others use it: for some seconds already, and then until they have left it alone for some."""
        now, is_used = self._clock(), self.by_others() >= TAKEN
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
