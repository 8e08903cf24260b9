"""How much memory a container leaves its processes: the limits of Linux control groups, versions 1 and 2.

Groups are nested. Each may have a limit, and a process must keep to those of all groups that it is in.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The groups' folder; the files with the limit and the use; the part of the use that the kernel can reclaim.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


class Limit(NamedTuple):
    """Bytes that the processes of a group may hold together, and how many of these are free."""

    total: int
    free: int


def limits(root: Path = Path("/")) -> Iterator[Limit]:
    """The limits on this process, in any order; none on other systems than Linux.

    Args:
        root: the root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, *names = _VERSION_1 if controllers else _VERSION_2
        # Inside a container the path may be the host's; then only the top folder exists.
        inner = Path(path.lstrip("/"))
        for folder in {root / top / group for group in (inner, *inner.parents)}:
            if (limit := _limit(folder, *names)) is not None:
                yield limit


def _limit(folder: Path, total_file: str, used_file: str, reclaimable: str) -> Limit | None:
    try:
        total, used = int((folder / total_file).read_text()), int((folder / used_file).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
    return Limit(total, max(0, total - used + int(counts.get(reclaimable, 0))))
