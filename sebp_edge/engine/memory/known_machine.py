"""What is known of this machine without torch: the target of a plan, as a process with torch once found it."""

import sys
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from shutil import which

from sebp_edge.basics.files import keep, parse_dataclass, read_kept
from sebp_edge.basics.version import __version__
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.four_bits import has_bitsandbytes
from sebp_edge.machine.host import WIDE, free_host_memory, nvidia_smi, parse_use

# Bytes of a process that has imported torch and all that a training needs on the CPU: 0.46 to 0.51 GB were measured.
HOST_CONTEXT = 510_000_000


def recall_machine(device: str | None, width: int = 0) -> tuple[Target, int] | None:
    """Returns a device to plan for, and the bytes that are free on it now; None if torch must find that out.

    A CPU that torch has not measured yet is known well enough, but for its speed; fp32 takes the most memory.
    """
    try:
        known = read_kept("machine", _packages())[known_name(device or "default", width)]
        target, uuid = parse_dataclass(known["target"], Target), known["uuid"]
    except (ValueError, LookupError, TypeError):
        is_only_one = device is None and sys.platform != "darwin" and not which("nvidia-smi")
        if device != "cpu" and not is_only_one:
            return None
        return Target("cpu", "float32", False, has_bitsandbytes(), None, HOST_CONTEXT), free_host_memory()
    host, target = free_host_memory(), replace(target, has_bitsandbytes=has_bitsandbytes())
    if not uuid:
        return target, host
    free = parse_use(nvidia_smi("--query-gpu=uuid,memory.free"), uuid)
    return None if free is None else (replace(target, host=host), free)


def known_name(device: str, width: int) -> str:
    """Returns the name under which a device is kept for models of a width, which decides the dtype on a CPU."""
    return f"{device}, wide" if width >= WIDE else device


def remember_machine(targets: dict[str, Target], uuid: str = "") -> None:
    """Keeps what torch found, and the highest speed of a device, since a busy machine is found to be slow.

    Args:
        targets: the device by its names (see `known_name`), and as "default" if it is.
        uuid: that of the GPU.
    """
    devices = read_kept("machine", _packages()) or {}
    for name, target in targets.items():
        values = asdict(target)
        del values["host"]  # what is free changes
        with suppress(ValueError, LookupError, TypeError):
            values["rate"] = max(target.rate, parse_dataclass(devices[name]["target"], Target).rate)
        devices[name] = {"target": values, "uuid": uuid}
    keep("machine", _packages(), devices)


def _packages() -> dict[str, str]:
    """Returns what decides what torch finds: a folder of packages, and their versions."""
    return {"packages": sys.prefix, "version": __version__, "torch": version("torch")}
