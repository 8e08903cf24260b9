"""Writes weights as safetensors, a tensor at a time."""

import json
import math
from pathlib import Path

import torch

from sebp_edge.export.gguf_file import Done
from sebp_edge.export.weights import MergedWeights

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_weights(path: Path, weights: MergedWeights, done: Done) -> None:
    """Writes a model's weights in the dtype of most of them; holds one tensor in memory at a time."""
    dtype = weights.dtype if weights.dtype in _NAMES else torch.float32
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in weights.shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, name in enumerate(weights.shapes, start=1):
            tensor = weights.read(name).to(dtype).contiguous()
            file.write(memoryview(tensor.view(torch.uint8).numpy()).cast("B") if tensor.numel() else b"")
            done(number, len(weights.shapes))
