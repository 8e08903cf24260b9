"""A merged model's config.json means the same to programs that read older names, whichever names its base model has."""

import json

import pytest
from export_sources import FAMILIES, GEMMA_3, LINEAR_ROPE, LOCAL_THETA, LONG_ROPE, MERGED_ONLY, THETA
from export_sources import ROPE as DEFAULT_ROPE
from transformers import AutoConfig, Gemma3TextConfig

from sebp_edge.engine.models.older_names import (
    OLDER_ROPE,
    ROPE,
    complete_config,
    differing_names,
    has_older_names,
    readable_by_older,
)

# The positions of Gemma 4's full attention and the sections of Qwen3.5's have no older name.
NEW = {name: make for name, make in FAMILIES.items() if name.startswith(("gemma4", "qwen3.5"))}
ALL = {name: make for name, make in (FAMILIES | MERGED_ONLY).items() if name not in NEW}
_LINEAR = {"type": "linear", "rope_type": "linear", "factor": 4.0}
# What the config.json of such a model has that transformers 4 wrote.
OLDER = {name: {"rope_theta": THETA, "rope_scaling": None} for name in ALL}
OLDER["llama-3.1"]["rope_scaling"] = {
    "type": "llama3",
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLDER["llama-linear"]["rope_scaling"] = _LINEAR
OLDER["llama-yarn"]["rope_scaling"] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
for _name, _scaling in (("gemma3", None), ("gemma3-linear", _LINEAR)):
    OLDER[_name] = {
        "rope_theta": THETA,
        "rope_scaling": _scaling,
        "rope_local_base_freq": LOCAL_THETA,
        "sliding_window_pattern": 6,
    }
OLDER["phi3"]["partial_rotary_factor"] = 0.5
OLDER["phi3-long"] |= {
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 128,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": LONG_ROPE["long_factor"],
        "short_factor": LONG_ROPE["short_factor"],
    },
}


def written_by_5(name):
    """A model's config, and the values of its config.json as transformers 5 writes it."""
    config = ALL[name]()
    return config, json.loads(config.to_json_string())


def complete(config, own):
    return complete_config(config, own, "SomeForCausalLM", "bfloat16")


def kept(values, own):
    """Those of the values that `own` has, and that are not of the files that are written."""
    return {key: values[key] for key in own if key not in ("dtype", "architectures")}


def assert_same_to_all(values, config):
    for unread in ((), OLDER_ROPE, (ROPE,)):
        assert differing_names(values, config, unread) == []


@pytest.mark.parametrize("name", ALL)
def test_the_older_names_are_added_to_a_config_of_transformers_5(name):
    config, own = written_by_5(name)
    assert not set(own) & set(OLDER_ROPE)
    values = complete(config, own)
    assert {key: values[key] for key in OLDER[name]} == OLDER[name]
    assert kept(values, own) == kept(own, own)
    assert_same_to_all(values, config)


@pytest.mark.parametrize("name", ALL)
def test_the_newer_names_are_added_to_a_config_of_transformers_4(name):
    config, own = written_by_5(name)
    del own[ROPE]
    own |= OLDER[name]
    read = AutoConfig.for_model(**json.loads(json.dumps(own)))
    values = complete(read, own)
    assert kept(values, own) == kept(own, own)
    assert ROPE in values
    assert_same_to_all(values, config)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lost", OLDER_ROPE)
def test_a_lost_setting_is_found(name, lost):
    config, own = written_by_5(name)
    values = complete(config, own)
    had = values.pop(lost, None)
    assert differing_names(values, config, (ROPE,)) == ([] if had in (None, 1.0) else [ROPE])


@pytest.mark.parametrize(
    "own", [{"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": None}, {"rope_scaling": {"type": "linear"}}]
)
def test_older_names_that_contradict_the_newer_ones_are_replaced(own):
    config, by_5 = written_by_5("llama-3.1")
    values = complete(config, by_5 | own)
    assert {key: values[key] for key in OLDER["llama-3.1"]} == OLDER["llama-3.1"]
    assert_same_to_all(values, config)


def test_settings_that_only_others_read_are_kept_and_code_is_not_named():
    config, own = written_by_5("llama")
    values = complete(
        config, own | {"other": {"a": [1]}, "auto_map": {"AutoConfig": "code.Config"}, "_name_or_path": "/a"}
    )
    assert values["other"] == {"a": [1]}
    assert not {"auto_map", "_name_or_path"} & values.keys()
    assert (values["dtype"], values["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert values["architectures"] == ["SomeForCausalLM"]


def test_a_tokenizers_settings_are_those_of_transformers_4():
    found = readable_by_older(
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"], "eos_token": "b"}
    )
    assert found == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
        "eos_token": "b",
    }
    for kept in ({"tokenizer_class": "LlamaTokenizer"}, {"extra_special_tokens": {"image_token": "<i>"}}):
        assert readable_by_older(kept) == kept


def test_settings_without_older_names_are_known_as_such():
    assert all(has_older_names(make()) == (name not in NEW) for name, make in (ALL | NEW).items())
    scaled = {"full_attention": DEFAULT_ROPE, "sliding_attention": LINEAR_ROPE}
    assert not has_older_names(Gemma3TextConfig(**GEMMA_3, rope_parameters=scaled))
