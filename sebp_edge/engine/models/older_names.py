"""Writes a model's config and tokenizer under the names of transformers 5 and of the programs before it.

transformers 5 moved the settings of rotary embeddings into `rope_parameters` and renamed others. transformers 4 and
mlx-lm read the older names, and silently take a default of their own if these are missing.
"""

import copy
import json
from collections.abc import Collection, Mapping

from transformers import AutoConfig

ROPE = "rope_parameters"
# What transformers 4 and mlx-lm read instead.
OLDER_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
# What does not change what a model computes, or is written for other weights and files than these.
_OTHER = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"}
_LAYERS = {"full_attention", "sliding_attention"}


def complete_config(config, own: Mapping, architecture: str, dtype: str) -> dict:
    """Returns the values of a config.json that means the same under the newer and under the older names.

    Those of the model's own config.json are kept; it may have none.
    """
    known = json.loads(config.to_json_string())
    values = known | dict(own)
    # The code that `auto_map` names does not come along, and `_name_or_path` may be a path of the user's.
    values = _without(values, {"auto_map", "_name_or_path"})
    for part in config.sub_configs:
        if isinstance(known.get(part), dict):
            own_part = own.get(part) if isinstance(own.get(part), dict) else {}
            values[part] = _with_older_names(known[part], known[part] | own_part)
    values = _with_older_names(known, values)
    if differing_names(values, config, (ROPE,)):  # the file's own older names contradict the newer ones
        values = _with_older_names(known, _without(values, set(OLDER_ROPE)))
    return values | {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}


def differing_names(values: Mapping, config, unread: Collection[str]) -> list[str]:
    """Returns the settings that differ from a model's if its config.json is read by a program that lacks some names.

    Those `unread` are `OLDER_ROPE` for transformers 5, and (`ROPE`,) for others.
    """
    read = copy.deepcopy(_without(values, {*unread, *_OTHER}))
    read |= {part: _without(read[part], set(unread)) for part in config.sub_configs if isinstance(read.get(part), dict)}
    try:
        found = AutoConfig.for_model(**read)
    except Exception as error:  # transformers refuses values with errors of any kind
        return [type(error).__name__]
    found, expected = (_comparable(json.loads(each.to_json_string())) for each in (found, config))
    ignored = {*_OTHER, *OLDER_ROPE}
    return sorted(name for name in expected if name not in ignored and found.get(name) != expected[name])


def has_older_names(config) -> bool:
    """Whether all settings of a model's rotary embeddings can be written under the older names."""
    return not differing_names(complete_config(config, {}, "", ""), config, (ROPE,))


def readable_by_older(values: dict) -> dict:
    """Returns the values of a tokenizer_config.json that transformers 4 reads too."""
    if values.get("tokenizer_class") == "TokenizersBackend":
        values = values | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(values.get("extra_special_tokens"), list):
        tokens = values["extra_special_tokens"]
        values = _without(values, {"extra_special_tokens"}) | {"additional_special_tokens": tokens}
    return values


def _with_older_names(known: Mapping, values: dict) -> dict:
    """Adds the older names of the settings in `known` that `values` lacks."""
    rope, kinds = known.get(ROPE), known.get("layer_types")
    older = _older_rope(rope, known.get("model_type")) if isinstance(rope, dict) else {}
    if kinds and "sliding_attention" in kinds and set(kinds) <= _LAYERS and (pattern := _pattern(kinds)) is not None:
        older["sliding_window_pattern"] = pattern
    return older | values


def _older_rope(rope: Mapping, family: str | None) -> dict:
    """Returns the parameters of rotary embeddings under the older names; empty if these have none for them."""
    if rope.keys() == _LAYERS:
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        if not full or not sliding or sliding.get("rope_type", "default") != "default":
            return {}
        older = _older_rope(full, family)
        return older and older | {"rope_local_base_freq": sliding["rope_theta"]}
    kind = rope.get("rope_type", "default")
    if "rope_theta" not in rope or kind == "proportional":  # transformers 4 knows no such kind
        return {}
    scaling = _without(rope, {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind == "longrope" and "original_max_position_embeddings" in scaling:
        older["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if family == "phi3":
        # transformers 4 refuses all but three names here.
        older["rope_scaling"] = {"type": kind} | _without(scaling, {"original_max_position_embeddings"})
    else:
        older["rope_scaling"] = {"type": kind, "rope_type": kind} | scaling
    if kind == "default":
        older["rope_scaling"] = None
    return older


def _pattern(kinds: list[str]) -> int | None:
    """Returns n if every nth layer, and no other, has full attention; None if the layers have no such order."""
    for every in range(1, len(kinds) + 2):
        if all((kind == "full_attention") == (layer % every == 0) for layer, kind in enumerate(kinds, start=1)):
            return every
    return None


def _comparable(values: dict) -> dict:
    """Returns a config's values with one spelling of the kind of rotary embeddings."""
    if isinstance(rope := values.get(ROPE), dict):
        nested = {name: _without(each, {"type"}) for name, each in rope.items() if isinstance(each, dict)}
        values = values | {ROPE: _without(rope, {"type"}) | nested}
    return values


def _without(values: Mapping, names: set[str]) -> dict:
    return {name: value for name, value in values.items() if name not in names}
