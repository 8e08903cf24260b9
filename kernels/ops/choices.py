"""Chooses what computes the gradients of a linear layer: our kernel and its tiles, or cuBLAS on gathered rows.

Nothing is measured here. A choice comes from what `measure` found on this machine, else from the shipped measurements
of a GPU of the same kind, else it is cuBLAS. Rows whose number only the device knows always take our kernel.
"""

import ctypes
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from sebp_edge.basics.files import cache_folder, write_atomically

from .tiles import Tiles, safe_tiles

logger = logging.getLogger(__name__)


class Algorithms(NamedTuple):
    """How each gradient is computed: our kernel's tiles, or None for cuBLAS."""

    dx: Tiles | None = None
    dweight: Tiles | None = None


class Shape(NamedTuple):
    """What a choice depends on."""

    wanted: str  # "dx", "dweight" or "both", for which cuBLAS gathers once
    bits: int  # per element; both 16-bit dtypes run alike
    num_inputs: int
    num_outputs: int
    bucket: int  # the number of active rows, rounded up to a power of two

    @classmethod
    def of(
        cls, needs_dx: bool, needs_dweight: bool, itemsize: int, num_inputs: int, num_outputs: int, num_active: int
    ) -> "Shape":
        """The shape of a backward pass that needs at least one of the two products."""
        wanted = "both" if needs_dx and needs_dweight else "dx" if needs_dx else "dweight"
        return cls(wanted, 8 * itemsize, num_inputs, num_outputs, 1 << max(0, num_active - 1).bit_length())


def choose(shape: Shape, device: torch.device) -> Algorithms:
    """The fastest known algorithms for a shape."""
    return _known(device_index(device)).get(shape, Algorithms())


def choose_for_unknown_count(itemsize: int, device: torch.device) -> Algorithms:
    """The algorithms for rows whose number only the device knows: our kernels, with tiles that fit everywhere."""
    tiles = safe_tiles(itemsize, shared_memory(device_index(device)))
    return Algorithms(tiles, tiles)


@functools.cache
def shared_memory(index: int) -> int:
    """Bytes of shared memory that one program may have."""
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


@functools.cache
def _known(index: int) -> Mapping[Shape, Algorithms]:
    return shipped(torch.cuda.get_device_name(index)) | read(measured_file(index))


def device_index(device: torch.device) -> int:
    """The index of a GPU; the current one's if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


# --------------------------------------------------------------------------------------------------------------- files


@functools.cache
def machine(index: int) -> dict[str, str]:
    """What timings depend on; the name of their file is a hash of it."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(index),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _driver_version() -> str:
    """The CUDA version of the installed driver, which is not torch's: 13000 for 13.0."""
    version = ctypes.c_int()
    # torch has loaded this library.
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value)


def shipped(gpu: str) -> dict[Shape, Algorithms]:
    """The shipped choices for a GPU: choices-h200.json is for every GPU with H200 in its name."""
    for path in sorted(Path(__file__).parent.glob("choices-*.json")):
        if path.stem.removeprefix("choices-") in gpu.lower():
            return read(path)
    return {}


def choices_file(folder: str | Path, machine: dict[str, str], kind: str = "choices") -> Path:
    """The file of this machine's choices, or of another kind of measurement."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{kind}-{digest[:12]}.json"


def measured_file(index: int) -> Path:
    """The file of what `measure` has found on this machine."""
    return choices_file(cache_folder(), machine(index))


def read(path: Path) -> dict[Shape, Algorithms]:
    """The choices in a file; none if there is no file, and none, with a warning, if it cannot be read."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))["choices"]
        return {
            Shape(**record["shape"]): Algorithms(_tiles(record["dx"]), _tiles(record["dweight"])) for record in records
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(f"{path} is not a valid file of choices and is ignored ({error!r}). Measure again.")
        return {}


def write(path: Path, machine: dict[str, str], choices: Mapping[Shape, Algorithms]) -> None:
    """Adds these choices to a file, atomically."""
    choices = {**read(path), **choices}
    records = [
        {
            "shape": shape._asdict(),
            **{name: "cublas" if tiles is None else tiles._asdict() for name, tiles in algorithms._asdict().items()},
        }
        for shape, algorithms in sorted(choices.items())
    ]
    lines = ",\n".join(json.dumps(record) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, f'{{"machine": {json.dumps(machine)},\n"choices": [\n{lines}\n]}}\n')
    _known.cache_clear()


def _tiles(value: dict | str) -> Tiles | None:
    if value == "cublas":
        return None
    tiles = Tiles(**value)
    if not all(isinstance(number, int) and number > 0 for number in tiles):
        raise ValueError(f"{value} does not describe tiles")
    return tiles
