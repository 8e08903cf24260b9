"""The layers after the last attention are found by their names and kinds."""

import pytest
import torch
from builders import make_llama
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sebp_edge.engine.models.architecture import is_activation, is_linear, is_norm, layers_after_attention


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


@pytest.mark.parametrize(
    ("module", "norm", "activation"),
    [
        (nn.LayerNorm(4), True, False),
        (nn.LayerNorm((2, 4)), False, False),
        (nn.RMSNorm(4), True, False),
        (LlamaRMSNorm(4), True, False),
        (nn.BatchNorm1d(4), False, False),
        (nn.GELU(), False, True),
        (ACT2FN["gelu"], False, True),
        (nn.Tanh(), False, True),
        (nn.ReLU(inplace=True), False, False),
        (nn.PReLU(4), False, False),
        (nn.Dropout(), False, False),
        (nn.Softmax(dim=-1), False, False),
        (nn.Linear(4, 4), False, False),
    ],
    ids=repr,
)
def test_which_modules_are_norms_and_activations(module, norm, activation):
    assert (is_norm(module), is_activation(module)) == (norm, activation)
