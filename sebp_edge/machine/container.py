"""Reads the memory limits of containers: those of Linux control groups, versions 1 and 2.

Groups are nested. Each may have a limit, and the limits of all groups that a process is in apply to it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The groups' folder, the files with the limit and the usage, and the part of the usage that the kernel can reclaim.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


class Limit(NamedTuple):
    """Bytes that the processes of a group may use together, and how many of these are free."""

    total: int
    free: int


def limits(root: Path = Path("/")) -> Iterator[Limit]:
    """Yields the limits on this process, in any order; none on systems other than Linux."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, *names = _VERSION_1 if controllers else _VERSION_2
        # Inside a container the path may be the host's, in which case only the top folder exists.
        inner = Path(path.lstrip("/"))
        for folder in {root / top / group for group in (inner, *inner.parents)}:
            if (limit := _limit(folder, *names)) is not None:
                yield limit


def _limit(folder: Path, total_file: str, used_file: str, reclaimable: str) -> Limit | None:
    try:
        total, used = int((folder / total_file).read_text()), int((folder / used_file).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # The group does not exist, or its limit is "max".
        return None
    return Limit(total, max(0, total - used + int(counts.get(reclaimable, 0))))
