"""States that must restart at each text: convolutions, linear attention and state spaces compute what the dense model
does, whatever the lengths of the texts, and no text reaches another."""

import random

import pytest
import torch
from against_dense import assert_same_gradients, dense_losses, gradients, padded_batch, with_lora
from builders import SIZES, batch_losses, hoist, row_losses
from model_families import LINEAR, MODELS, SLIDING, make_model
from pairwise import pairwise
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2MoeConfig,
    Mamba2Config,
    NemotronHConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
)

from sebp_edge.engine.sparse.patches.restarts import Restarts
from sebp_edge.engine.sparse.rows.buckets import lengths_together, most_lengths
from sebp_edge.research import ActiveTokens, RowPlan

MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "lfm2": MODELS["lfm2"],
    "qwen3.5": MODELS["qwen3.5"],
    "recurrent-gemma": lambda: make_model(RecurrentGemmaConfig(**SIZES | {"num_hidden_layers": 3}, lru_width=32)),
    "falcon-h1": lambda: make_model(FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64)),
    "bamba": lambda: make_model(BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1])),
}
# Shorter than the convolutions' kernels, of one token, without any active row, and one that is far the longest.
LENGTHS = (2, 1, 24, 3, 1, 5, 2, 4)


@pairwise(family=FAMILIES.keys(), adapt=["full", "lora"], dtype=[torch.float64, torch.float32], prompt=[0, 2])
def test_short_and_long_texts_have_the_dense_losses_and_gradients(family, adapt, dtype, prompt):
    model, batch = FAMILIES[family]().to(dtype), padded_batch(LENGTHS, prompt=prompt)
    if adapt == "lora":
        model = with_lora(model).to(dtype)
    expected = dense_losses(model, batch)
    expected_gradients = gradients(model, expected)
    with hoist(model) as hoisted:
        found = batch_losses(hoisted, batch)
        assert_same_gradients(expected_gradients, gradients(model, found), *([] if dtype == torch.float64 else [2e-4, 1e-5]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
