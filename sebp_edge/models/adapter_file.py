"""Checks an untrusted safetensors file without torch: what its tensors are, and whether all are finite."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sebp_edge.basics.files import read_json

# PEFT's names in a file.
SUFFIX_A, SUFFIX_B = ".lora_A.weight", ".lora_B.weight"
_MAX_HEADER = 2**26
_CHUNK = 2**20
# By dtype, the bytes of a value, and which bits of its last two bytes are all set in infinity and NaN.
_EXPONENTS = {
    **{"F64": (8, 0x7F, 0xF0), "F32": (4, 0x7F, 0x80), "BF16": (2, 0x7F, 0x80), "F16": (2, 0x7C, 0)},
    **{"F8_E5M2": (1, 0x7C, 0), "F8_E4M3": (1, 0x7F, 0)},
}


def read_header(path: Path) -> dict[str, dict]:
    """Returns the dtype, the shape and the place of each tensor, by name; raises an OSError or ValueError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(file.read(size))
    try:
        header.pop("__metadata__", None)
        last = 0
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            if [type(each) for each in (begin, end, tensor["shape"], tensor["dtype"])] != [int, int, list, str]:
                raise TypeError
            if not 0 <= begin <= end:
                raise LookupError
            last = max(last, end)
        if path.stat().st_size != 8 + size + last:
            raise ValueError("weights are missing")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("the header is damaged") from error
    return header


def has_rank(r: int, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the matrices of an adapter have this rank."""
    own = [shape[0] for name, shape in shapes.items() if name.endswith(SUFFIX_A) and shape]
    own += [shape[-1] for name, shape in shapes.items() if name.endswith(SUFFIX_B) and shape]
    return all(each == r for each in own)


def reason_against(folder: Path) -> str | None:
    """Returns why the weights in a folder and those below it must not be used; None for others, and what is none."""
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            header = read_header(path)
        except (OSError, ValueError, RecursionError):  # loading it says why
            continue
        if (config := path.with_name("adapter_config.json")).is_file():
            try:
                r = read_json(config).get("r")
            except (OSError, ValueError):
                return "its adapter_config.json is damaged"
            if not has_rank(r, {name: tensor["shape"] for name, tensor in header.items()}):
                return f"its matrices do not have the rank r of its adapter_config.json, {str(r)[:20]}"
        if (name := _first_non_finite(path, header.items())) is not None:
            return f"it contains NaN or infinity, in the tensor {name[:200]!r} of {path.name}"
    return None


def _first_non_finite(path: Path, tensors: Iterable[tuple[str, dict]]) -> str | None:
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        for name, tensor in tensors:
            if tensor["dtype"] in _EXPONENTS:
                at, end = tensor["data_offsets"]
                file.seek(begin + at)
                for place in range(at, end, _CHUNK):
                    if _has_non_finite(file.read(min(_CHUNK, end - place)), *_EXPONENTS[tensor["dtype"]]):
                        return name
    return None


def _has_non_finite(data: bytes, size: int, high: int, low: int) -> bool:
    """Whether a value has an exponent of ones: its last byte has the bits `high`, the one before `low`."""
    last = data[size - 1 :: size].translate(bytes(byte & high == high for byte in range(256)))
    if not low or 1 not in last:
        return 1 in last
    before = data[size - 2 :: size].translate(bytes(byte & low == low for byte in range(256)))
    return bool(int.from_bytes(last) & int.from_bytes(before))
