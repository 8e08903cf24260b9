"""What is known of this machine without torch: the target of a plan, as a process with torch once found it."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from shutil import which

from sebp_edge.basics.files import cache_folder, parse_dataclass, read_json, write_cache
from sebp_edge.basics.version import __version__
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.four_bits import has_bitsandbytes
from sebp_edge.machine.host import WIDE, free_host_memory, nvidia_smi, parse_use

_FILE = "machine.json"
# Bytes of a process that has imported torch and all that a training needs on the CPU: 0.46 to 0.51 GB were measured.
HOST_CONTEXT = 510_000_000


def recall_machine(device: str | None, width: int = 0) -> tuple[Target, int] | None:
    """Returns a device to plan for, and the bytes that are free on it now; None if torch must find that out.

    A CPU that torch has not measured yet is known well enough, but for its speed; fp32 takes the most memory.
    """
    known = _read().get(known_name(device or "default", width))
    try:
        target = replace(parse_dataclass(known, Target), has_bitsandbytes=has_bitsandbytes())
    except (ValueError, TypeError):
        is_only_one = device is None and sys.platform != "darwin" and not which("nvidia-smi")
        if device != "cpu" and not is_only_one:
            return None
        return Target("cpu", "float32", False, has_bitsandbytes(), None, HOST_CONTEXT), free_host_memory()
    host = free_host_memory()
    if not known.get("uuid"):
        return target, host
    free = parse_use(nvidia_smi("--query-gpu=uuid,memory.free"), known["uuid"])
    return None if free is None else (replace(target, host=host), free)


def known_name(device: str, width: int) -> str:
    """Returns the name under which a device is kept for models of a width, which decides the dtype on a CPU."""
    return f"{device}, wide" if width >= WIDE else device


def remember_machine(targets: dict[str, Target], gpu: str = "") -> None:
    """Keeps what torch found, and the highest speed of a device, since a busy machine is found to be slow.

    Args:
        targets: the device by its names (see `known_name`), and as "default" if it is.
        gpu: the UUID of the GPU.
    """
    # Free memory is asked for again, and infinity is not JSON.
    found = {name: {**vars(target), "uuid": gpu} for name, target in targets.items()}
    known = _read()
    for name, each in found.items():
        del each["host"]
        with suppress(ValueError, TypeError):
            each["rate"] = max(each["rate"], parse_dataclass(known.get(name), Target).rate)
    write_cache(_FILE, json.dumps({"versions": _versions(), "devices": known | found}))


def _read() -> dict:
    try:
        known = read_json(cache_folder() / _FILE)
        return known["devices"] if known["versions"] == _versions() else {}
    except (OSError, ValueError, LookupError):
        return {}


def _versions() -> list[str]:
    """Returns what decides what torch finds: a folder of packages, and their versions."""
    return [sys.prefix, __version__, version("torch")]
