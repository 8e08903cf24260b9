"""Writes a LoRA adapter as mlx-lm reads it: its matrices are the transposed ones."""

import json
from pathlib import Path

from safetensors.torch import save_file

from sebp_edge.basics.files import read_json
from sebp_edge.basics.weights import read_weights
from sebp_edge.engine.models.lora import LoraFactors


def write_adapter(folder: Path, factors: LoraFactors, num_layers: int) -> None:
    """Writes adapters.safetensors and adapter_config.json, for `mlx_lm.generate --adapter-path`."""
    tensors = {}
    for name, (lora_A, lora_B) in factors.matrices.items():
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.lora_a"] = lora_A.T.contiguous()
        tensors[f"{layer}.lora_b"] = lora_B.T.contiguous()
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": factors.r,
            "scale": factors.scale,
            "dropout": 0.0,
            "keys": sorted({_key(name) for name in factors.matrices}),
        },
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> LoraFactors:
    """Reads what `write_adapter` has written."""
    values, tensors = read_json(folder / "adapter_config.json"), read_weights(folder / "adapters.safetensors")
    layers = {name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")}
    matrices = {f"{layer}.weight": (tensors[f"{layer}.lora_a"].T, tensors[f"{layer}.lora_b"].T) for layer in layers}
    lora = values["lora_parameters"]
    return LoraFactors(lora["rank"], lora["scale"] * lora["rank"], matrices)


def _key(name: str) -> str:
    """Returns a layer's path within its block, as `self_attn.q_proj`."""
    path = name.removesuffix(".weight").split(".")
    number = next(position for position, part in enumerate(path) if part.isdigit())
    return ".".join(path[number + 1 :])
