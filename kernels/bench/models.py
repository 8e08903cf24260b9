"""Models of published shapes with random weights, and the lengths of real texts, for benchmarks."""

import copy
import json
import tomllib
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from sebp_edge.engine.models.catalog import CATALOG, bundled_config, resolve
from sebp_edge.values.model_reference import ModelReference

LENGTHS = Path(__file__).with_name("lengths.json")
SHAPES = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def published_sizes(name: str) -> dict:
    """The values of the config of a model in the catalog or in shapes.toml."""
    if name in CATALOG:
        return json.loads(bundled_config(resolve(name)).read_text(encoding="utf-8"))
    return {key: value for key, value in SHAPES[name].items() if key != "exactness"}


def known_config(name: str) -> PretrainedConfig:
    """The config of a model in the catalog or in shapes.toml."""
    return AutoConfig.for_model(**published_sizes(name))


def resolve_config(model: str | Path) -> ModelReference:
    """Like `resolve`, for uses that need a config only: `model` may also be the path of a config.json."""
    path = Path(model).expanduser()
    if path.suffix != ".json" or not path.is_file():
        return resolve(model)
    return ModelReference(path.parent.name if path.name == "config.json" else path.stem, "local", str(path.absolute()))


def make_model(config: PretrainedConfig, device: torch.device) -> nn.Module:
    """A decoder with random bf16 weights and no zero row in the embedding.

    transformers leaves the padding token's embedding zero. In Gemma's configs that is token 0, with which the bundled
    tokenizer begins every text. A row that stays zero through all RMSNorms has its gradient multiplied by 1 / sqrt(eps)
    in each of them, which overflows in any dtype.
    """
    with device:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        nn.init.normal_(embedding.weight.data[embedding.padding_idx], std=config.initializer_range)
    scale_queries(model)
    return model


def scale_queries(model: nn.Module) -> None:
    """Divides queries by the root of the head size where attention does not: Gemma 4's norms of queries have learnt to.

    With norms of 1, attention is so sharp that an error of bf16 gradients is larger than the gradients are.
    """
    for layer in model.modules():
        if getattr(layer, "q_norm", None) is not None and getattr(layer, "scaling", None) == 1:
            layer.q_norm.weight.data.mul_(layer.q_norm.weight.numel() ** -0.5)
