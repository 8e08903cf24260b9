"""Reads safetensors files from untrusted sources, refuses those with NaN or infinity, and writes such files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Size, Tensor, nn

from sebp_edge.basics.files import read_json
from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.errors import AdapterError, MachineError, SebpEdgeError

# PEFT's names in a file.
SUFFIX_A, SUFFIX_B = ".lora_A.weight", ".lora_B.weight"
# The dtypes that are written, and their names in the files.
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@contextmanager
def raising_adapter_error(folder: Path) -> Iterator[None]:
    """Context that turns errors of libraries about an adapter's damaged files into an AdapterError."""
    try:
        yield
    except SebpEdgeError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise MachineError(f"Out of memory while loading the adapter in {folder.name!r}.") from error
        reason = f"{error.strerror}" if isinstance(error, PermissionError) else type(error).__name__
        raise AdapterError(f"The adapter in {folder.name!r} is damaged ({reason}).") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a file's tensors by name; they are memory-mapped.

    Raises:
        OSError, SafetensorError: the file cannot be read.
        TypeError: a tensor is not of floating-point numbers.
    """
    with path.open("rb"):  # raises the true OSError, which safetensors reports as a missing file
        tensors = load_file(path)
    if not all(tensor.is_floating_point() for tensor in tensors.values()):
        raise TypeError
    return tensors


def write_tensors(file: BinaryIO, kinds: Mapping[str, tuple[torch.dtype, Size]], tensors: Iterable[Tensor]) -> None:
    """Writes a safetensors file, a tensor at a time.

    Args:
        kinds: the dtype and the shape of each tensor, by name.
        tensors: the tensors in this order, on any device; each is read when the ones before are written.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        if tensor.numel():
            file.write(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))


class WeightsFile:
    """A safetensors file of a whole model; its tensors are read one at a time, and stay memory-mapped.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb"):  # raises the true OSError, which safetensors reports as a missing file
            self._file = safe_open(path, framework="pt")
        names = self._file.keys()
        self.shapes = {name: Size(self._file.get_slice(name).get_shape()) for name in names}

    def stored(self, name: str) -> Tensor:
        """Returns a tensor's stored values."""
        return self._file.get_tensor(name)

    def read(self, name: str) -> Tensor:
        """Returns a tensor."""
        tensor = self.stored(name)
        if not tensor.is_floating_point():
            raise TypeError
        return tensor

    def refuse_non_finite(self) -> None:
        """Raises an AdapterError that names the first tensor with NaN or infinity."""
        refuse_non_finite(((name, self.stored(name)) for name in self.shapes), self._path.parent, self._path.name)


def has_rank(r: int, shapes: Mapping[str, Size]) -> bool:
    """Whether the matrices of an adapter have this rank."""
    own = [shape[0] for name, shape in shapes.items() if name.endswith(SUFFIX_A)]
    return all(each == r for each in own + [shape[-1] for name, shape in shapes.items() if name.endswith(SUFFIX_B)])


def refuse_strangers(folder: Path) -> None:
    """Raises an AdapterError for weights in a folder with NaN, infinity, or another rank than they are said to have.

    Other damage is left to whoever loads them.
    """
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            file = WeightsFile(path)
        except (OSError, SafetensorError):
            continue
        config = path.with_name("adapter_config.json")
        with raising_adapter_error(folder):
            if config.is_file() and not has_rank(read_json(config).get("r"), file.shapes):
                raise AdapterError(f"The adapter in {folder.name!r} has matrices of another rank than its config's r.")
            file.refuse_non_finite()


def refuse_non_finite(tensors: Iterable[tuple[str, Tensor]], folder: Path, file: str) -> None:
    """Raises an AdapterError that names the first tensor with NaN or infinity."""
    if (name := first_non_finite(tensors)) is not None:
        raise AdapterError(
            f"The adapter in {folder.name!r} contains NaN or infinity, in the tensor {name!r} of {file}."
        )


def first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor with NaN or infinity, or None; allocates nothing of a tensor's size."""
    return next((name for name, tensor in tensors if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # torch cannot compare 8-bit floats
    return all(map(math.isfinite, tensor.aminmax()))


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors to save, by name; a tied weight, which the state dict has twice, only once."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return ((name, tensor) for name, tensor in model.state_dict().items() if name in own)
