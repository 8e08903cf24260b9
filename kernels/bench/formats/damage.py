"""Damages files as a bad disk, a faulty program or an attacker would; deterministic by seed."""

import json
import os
import random
import struct
from pathlib import Path

VALUES = [
    *(None, True, False, 0, -1, 3, 10**6, 10**18, 10**30, 0.5, 1e300, -1e300, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x1b[31m", "../../etc/passwd", "a" * 10_000, "(a+)+$", "all-linear"),
    *([], {}, [1], [None], [10**9], {"a": 1}, [[[]]], ["q_proj"]),
]
KEYS = ["x", "auto_map", "quantization_config", "runtime_config", "use_dora", "num_labels", "peft_type"]
TEXTS = [b"", b"null", b"1", b'"x"', b"[]", b"{}", b"NaN", b"[" * 5000, b'{"a":' + b"9" * 5000 + b"}", b"\xff\xfe{}"]
DTYPES = ["F16", "BF16", "F64", "I32", "BOOL", "F8_E4M3", "X", 3, None]
SHAPES = [[1], [0], [], [-1], "x", [10**9, 10**9], [2**63]]
OFFSETS = [[0, 1], [5, 1], [0, 0], [0, 10**12], [], "x"]
NUMBERS = [float("nan"), float("inf"), -float("inf"), 3e38]


def damage(path: Path, draw: random.Random) -> str:
    """Damages a file or replaces it with something else; returns a description."""
    if draw.random() < 0.1:
        return _replace(path, draw)
    content = path.read_bytes()
    if draw.random() < 0.2:
        path.write_bytes(damage_bytes(content, draw))
        return "other bytes"
    if path.suffix == ".json":
        values = json.loads(content)
        if isinstance(values, list):
            index = draw.randrange(len(values))
            values[index] = damage_values(values[index], draw)
        else:
            values = damage_values(values, draw)
        path.write_text(json.dumps(values))
        return "other values"
    if path.suffix == ".safetensors":
        path.write_bytes(_damage_tensors(content, draw))
        return "other tensors"
    path.write_bytes(damage_bytes(content, draw))
    return "other bytes"


def _replace(path: Path, draw: random.Random) -> str:
    path.unlink()
    replacements = {
        "missing": lambda: None,
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a loop": lambda: path.symlink_to(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
    }
    name = draw.choice(list(replacements))
    replacements[name]()
    return name


def damage_bytes(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return draw.choice(TEXTS)
    if draw.random() < 0.3:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice([1, 3, 20])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def damage_values(values: dict, draw: random.Random) -> dict:
    """Returns a JSON object with another value, without one, or with a strange one."""
    key = draw.choice([*values, *KEYS[:2]])
    if draw.random() < 0.1:
        return {name: value for name, value in values.items() if name != key}
    if isinstance(values.get(key), dict) and values[key] and draw.random() < 0.6:
        return values | {key: damage_values(values[key], draw)}
    if draw.random() < 0.1:
        key = draw.choice(KEYS)
    return values | {key: draw.choice(VALUES)}


def _damage_tensors(content: bytes, draw: random.Random) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    if draw.random() < 0.15:
        return struct.pack("<Q", draw.choice([0, 1, size - 1, size + 1, 2**40, 2**63])) + content[8:]
    if draw.random() < 0.3:
        offset = 4 * draw.randrange(len(body) // 4)
        body[offset : offset + 4] = struct.pack("<f", draw.choice(NUMBERS))
    name = draw.choice([name for name in header if name != "__metadata__"])
    match draw.randrange(7):
        case 0:
            header[name]["dtype"] = draw.choice(DTYPES)
        case 1:
            header[name]["shape"] = draw.choice([*SHAPES, header[name]["shape"][::-1]])
        case 2:
            header[name]["data_offsets"] = draw.choice(OFFSETS)
        case 3:
            header[draw.choice(["x", "é" * 100, "\x1b[2J"])] = header.pop(name)
        case 4:
            del header[name]
        case 5:
            header["__metadata__"] = draw.choice([{"format": "tf"}, {"a": 1}, "x", None])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)
