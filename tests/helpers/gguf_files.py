"""Writes models of transformers as GGUF files with the package `gguf`, as llama.cpp's converter does."""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

# Families whose queries and keys llama.cpp rotates in pairs, and whose norms it stores as 1 + w.
PAIRED, FROM_ONE = ("llama", "smollm3"), ("gemma", "gemma2", "gemma3", "qwen35")
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "qwen3_5_text": "qwen35"}


def write_gguf(
    path: Path, model, tokenizer, kind=Kind.F32, pre="gpt-2", tensors=None, without=None, **metadata
) -> Path:
    """Writes a model and its byte-level tokenizer.

    Args:
        kind: the type of all matrices whose rows it fits; others are in fp32.
        pre: the name of the pre-tokenizer.
        tensors: further tensors by name.
        without: the name of a tensor that is left out.
        metadata: further values, other ones, or None for none, by key; "__" stands for a dot, "arch" for the family.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    values = {
        **common_metadata(name, config),
        **tokenizer_metadata(tokenizer, pre, config.vocab_size),
        **{key.replace("__", ".").replace("arch.", f"{name}."): value for key, value in metadata.items()},
    }
    for key, value in values.items():
        if value is not None:
            add(writer, key, value)
    names = tensor_names(name)
    made = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # A layer that is there many times is quantised once.
        same = weight.data_ptr(), *key.split(".")[-2:]
        if same not in made:
            data = stored(name, key, weight.float(), config).numpy()
            fits = data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            made[same] = gguf.quantize(data, kind) if fits and kind != Kind.F32 else data, kind if fits else None
        data, raw_dtype = made[same]
        key = key.replace(".dt_bias", ".dt_proj.bias").replace("layer_scalar", "layer_scalar.weight")
        if (named := names.get_name(key, (".weight", ".bias"))) != without:
            writer.add_tensor(named, data, raw_dtype=raw_dtype)
    for key, values in (tensors or {}).items():
        writer.add_tensor(key, np.array(values, dtype=np.float32))
    finish(writer)
    return path


@functools.cache
def tensor_names(name: str) -> gguf.TensorNameMap:
    """The names of a family's tensors; looking them up takes longer than writing them."""
    return gguf.get_tensor_name_map(next(key for key, arch in gguf.MODEL_ARCH_NAMES.items() if arch == name), 99)


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def common_metadata(name, config) -> dict:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    of_layers = [*config.per_layer_config]
    head_size = getattr(of_layers[-1], "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": of_layers[-1].num_key_value_heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "norm_eps", None) or config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_size * (rope.get("partial_rotary_factor", 1) if name != "gemma4" else 1)),
        "vocab_size": config.vocab_size,
    }
    if name in ("gemma2", "gemma3", "gemma4", "phi3"):
        values["attention.sliding_window"] = config.sliding_window
    if name == "gemma2":
        values["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if name == "lfm2":
        attends = [kind == "full_attention" for kind in config.layer_types]
        values["attention.head_count_kv"] = [config.num_key_value_heads * each for each in attends]
        values["shortconv.l_cache"] = config.conv_L_cache
    if name == "qwen35":
        values["full_attention_interval"] = config.layer_types.index("full_attention") + 1
        values["rope.dimension_sections"] = [*rope["mrope_section"], 0]
        values["ssm.conv_kernel"], values["ssm.state_size"] = config.linear_conv_kernel_dim, config.linear_key_head_dim
        values["ssm.group_count"] = config.linear_num_key_heads
        values["ssm.time_step_rank"] = config.linear_num_value_heads
        values["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    if name == "gemma4":
        values |= gemma4_metadata(config, of_layers)
    return {f"{name}.{key}": value for key, value in values.items() if value is not None}


def gemma4_metadata(config, of_layers) -> dict:
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    local, own = of_layers[0].head_dim, config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [config.intermediate_size * (2 if number >= own else 1) for number in range(config.num_hidden_layers)]
    return {
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in of_layers],
        "rope.dimension_count_swa": local,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "feed_forward_length": sizes if config.use_double_wide_mlp else config.intermediate_size,
    }


def tokenizer_metadata(tokenizer, pre: str, size: int) -> dict:
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"]: token["content"] for token in saved["added_tokens"]}
    known = {number: token for token, number in saved["model"]["vocab"].items()} | special
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [known.get(number, f"[UNUSED{number}]") for number in range(size)],
        "tokenizer.ggml.token_type": [
            3 if number in special else 1 if number in known else 5 for number in range(size)
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def add(writer, key: str, value) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def stored(name: str, key: str, weight: torch.Tensor, config) -> torch.Tensor:
    if name in PAIRED and (".q_proj." in key or ".k_proj." in key):
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()
    if ".linear_attn." in key:
        return linear_attention(key, weight, config)
    if ".conv.conv." in key:
        return weight.squeeze(1)
    return weight + 1 if name in FROM_ONE and key.endswith("norm.weight") else weight


def linear_attention(key: str, weight: torch.Tensor, config) -> torch.Tensor:
    """As llama.cpp's converter does: the heads of values in the order of their number beside a key."""
    name = key.split(".linear_attn.")[1]
    weight = -weight.exp() if name == "A_log" else weight.squeeze(1) if name == "conv1d.weight" else weight
    if name == "norm.weight":
        return weight
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    rows = [head * per_key + number for number in range(per_key) for head in range(config.linear_num_key_heads)]
    if name == "out_proj.weight":
        return weight.unflatten(1, (config.linear_num_value_heads, -1))[:, rows].flatten(1)
    kept = 0
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        kept = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    moved = weight[kept:].unflatten(0, (config.linear_num_value_heads, -1))[rows].flatten(0, 1)
    return torch.cat([weight[:kept], moved])
