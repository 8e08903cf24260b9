"""What can be told of this machine and this process without torch: host memory, and what is known of GPUs."""

import ctypes
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from sebp_edge.basics.children import ending_with_this

# Linux control groups, which limit memory: their folder, the files with the limit and the usage, and the part of the
# usage that the kernel can reclaim.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_STATUS = Path("/proc/self/status")
# Bytes that a process uses outside torch's allocator, without stacks, once all that a training needs is loaded: 0.63 to
# 0.64 GB were measured on an H100, with bitsandbytes 0.67 GB.
CONTEXT = 680_000_000
# Hidden size from which a model may be in bf16 on a CPU. In narrower ones ("tiny" has 256, SmolLM2-135M 576), products
# are too small a part of a step.
WIDE = 512
# Bytes of a GPU's stack per thread (see `sebp_edge.machine.stacks`): the driver's default, and the lowered limit.
USUAL, LOWERED = 1024, 256


def limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yields the limits on this process, and how many of these bytes are free; none on systems other than Linux.

    Control groups are nested. Each may have a limit, and those of all groups that a process is in apply to it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, total, used, reclaimable = _VERSION_1 if controllers else _VERSION_2
        # Inside a container the path may be the host's, in which case only the top folder exists.
        inner = Path(path.lstrip("/"))
        for folder in {root / top / group for group in (inner, *inner.parents)}:
            if (limit := _limit(folder, total, used, reclaimable)) is not None:
                yield limit


def _limit(folder: Path, total_file: str, used_file: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        total, used = int((folder / total_file).read_text()), int((folder / used_file).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # The group does not exist, or its limit is "max".
        return None
    return total, max(0, total - used + int(counts.get(reclaimable, 0)))


def free_host_memory() -> int:
    """Returns the bytes of free host memory, within the limits of containers."""
    return min([psutil.virtual_memory().available, *(free for _, free in limits())])


def total_host_memory() -> int:
    """Returns the bytes of host memory, within the limits of containers."""
    return min([psutil.virtual_memory().total, *(total for total, _ in limits())])


def resident() -> int:
    """Returns the bytes of host memory that this process uses now."""
    return psutil.Process().memory_info().rss


def peak_resident() -> int:
    """Returns the peak in bytes of host memory over the lifetime of this process."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if _STATUS.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    import resource

    # On Linux this may be the peak of the parent process.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def nvidia_smi(query: str) -> str:
    """Returns nvidia-smi's answer, a line for each GPU or process; "" if it is missing or fails."""
    command = ending_with_this(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def driver_release() -> str:
    """Returns the release of NVIDIA's driver, such as "570.86.15"; "" without one that works."""
    release = ctypes.create_string_buffer(96)
    with suppress(OSError):
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(release, len(release))
    return release.value.decode()


@functools.cache
def gpu_use_at_first() -> str:
    """Returns nvidia-smi's answer about the memory in use on each GPU, when this process first asks."""
    return nvidia_smi("--query-gpu=uuid,memory.used")


def parse_use(answer: str, gpu: str, process: int | None = None) -> int | None:
    """Returns the bytes in use on a GPU, or those of a process; None if not listed.

    Args:
        answer: nvidia-smi's lines "GPU-uuid, MiB", or with a process "GPU-uuid, process, MiB".
    """
    of_process = [] if process is None else [str(process)]
    for line in answer.splitlines():
        match line.split(", "):
            case [uuid, *rest, size] if uuid.endswith(gpu) and rest == of_process and size.isdecimal():
                return int(size) * 2**20
    return None
