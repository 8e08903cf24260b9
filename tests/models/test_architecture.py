"""The layers after the last attention are found by their names and kinds."""

import torch
from builders import make_llama

from sebp_edge.engine.models.architecture import is_linear, layers_after_attention


def names_after_attention(model):
    after = layers_after_attention(model)
    return {name for name, layer in model.named_modules() if is_linear(layer) and layer in after}


def test_unknown_layers_in_attention_compute_all_rows():
    model = make_llama()
    attention = model.model.layers[-1].self_attn
    known = names_after_attention(model)
    assert {name.split(".")[-1] for name in known} == {
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"
    }  # fmt: skip
    attention.b_proj = torch.nn.Linear(4, 4)
    attention.gate = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert names_after_attention(model) == known
    attention.conv1d = torch.nn.Conv1d(4, 4, 3)
    assert names_after_attention(model) == {"lm_head"}
