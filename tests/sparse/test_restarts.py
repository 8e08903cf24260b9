"""States that must restart at each text: convolutions, linear attention and state spaces compute what the dense model
does, on packed texts of any lengths, and no text reaches another. So does Gemma 4, whose layers share keys."""

import copy
import random
from functools import partial

import pytest
import torch
from against_dense import assert_same_gradients, dense_losses, gradients, with_lora
from builders import IGNORE, SIZES, checkpoint_activations, gathered, hoist
from model_families import LINEAR, WITH_STATES, make_gemma4, make_model
from pairwise import pairwise
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3NextConfig,
)

from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps, _GatedNorm
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.errors import SparsityError

MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
WITHOUT_LAYERS = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
FAMILIES = {
    "lfm2": WITH_STATES["lfm2"],
    "qwen3.5": WITH_STATES["qwen3.5"],
    "qwen3-next": lambda: make_model(Qwen3NextConfig(**SIZES, head_dim=8, **LINEAR, mlp_only_layers=[0, 1])),
    "olmo-hybrid": lambda: make_model(OlmoHybridConfig(**SIZES, **LINEAR)),
    "falcon-h1": lambda: make_model(FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64)),
    "bamba": lambda: make_model(BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1])),
    "granite-hybrid": lambda: make_model(
        GraniteMoeHybridConfig(
            **SIZES, **MAMBA, num_local_experts=0, layer_types=["linear_attention", "full_attention"]
        )
    ),
    # Some of its blocks mix nothing.
    "nemotron-h": lambda: make_model(
        NemotronHConfig(**WITHOUT_LAYERS, **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention"])
    ),
}
FAMILIES["gemma4"] = partial(make_gemma4, use_double_wide_mlp=True)
# Shorter than a convolution's kernel, of one row, without any, and one that is far the longest.
LENGTHS = (2, 1, 24, 3, 1, 5, 2, 4)


def random_batch(lengths):
    """Other tokens in every run, padded on the right by one more than the longest needs."""
    input_ids = torch.full((len(lengths), max(lengths) + 1), SIZES["pad_token_id"])
    labels = torch.full_like(input_ids, IGNORE)
    for row, length in enumerate(lengths):
        ids = torch.tensor([random.randrange(7, 320) for _ in range(length)])
        input_ids[row, :length] = labels[row, :length] = ids
    return {"input_ids": input_ids, "labels": labels, "attention_mask": (labels != IGNORE).long()}


@pairwise(family=FAMILIES.keys(), adapt=["full", "lora"], dtype=[torch.float64, torch.float32])
def test_short_and_long_texts_have_the_dense_losses_and_gradients(family, adapt, dtype):
    model, batch = FAMILIES[family]().to(dtype), random_batch(LENGTHS)
    if adapt == "lora":
        # PEFT has no adapters for output projections of state spaces.
        model = with_lora(model, r".*(in_proj\w*|[abgkqv]_proj|conv\.out_proj|linear_[xy]|w1)").to(dtype)
    exact_model = copy.deepcopy(model).double()  # before it keeps a state, which has no copy
    expected = dense_losses(model, batch)
    expected_gradients = gradients(model, expected)
    with hoist(model) as hoisted:
        found = hoisted.row_losses(gathered(batch))
        found_gradients = gradients(model, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    if dtype == torch.float64:
        # Some of these states are in fp32 in any model.
        assert_same_gradients(expected_gradients, found_gradients, 5e-5, 1e-5)
        return
    # A few draws round by more than 1e-3 in either.
    exact_gradients = gradients(exact_model, dense_losses(exact_model, batch))
    largest = max(gradient.norm() for gradient in exact_gradients.values())
    for name, exact in exact_gradients.items():
        allowed = 2 * (expected_gradients[name] - exact).norm() + 1e-3 * exact.norm() + 1e-5 * largest
        assert (found_gradients[name] - exact).norm() <= allowed, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_a_text_depends_on_another(family):
    model, batch = FAMILIES[family](), random_batch(LENGTHS)
    changed = random.choice([row for row, length in enumerate(LENGTHS) if length > 2])
    with torch.no_grad(), hoist(model) as hoisted:
        tokens = gathered(batch)
        before = hoisted.row_losses(tokens)
        batch["input_ids"][changed, : LENGTHS[changed] - 1] = 5
        after = hoisted.row_losses(gathered(batch))
    others = tokens.sequences != changed
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize("options", [{"checkpoints": 1}, {"checkpoints": 1, "offload": True, "chunked_blocks": True}])
@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "falcon-h1", "gemma4"])
def test_checkpoints_recompute_the_texts_that_they_saw(family, options):
    model = FAMILIES[family]().double()
    first, second = (gathered(random_batch(lengths)) for lengths in (LENGTHS, (9, 8, 7)))
    with hoist(model) as hoisted:
        expected = gradients(model, hoisted.row_losses(first))
    with hoist(model, **options) as hoisted:
        hoisted.row_losses(second)
        losses = hoisted.row_losses(first)
        if "offload" not in options:  # which asks for each backward pass before the next forward pass
            hoisted.row_losses(second)
        assert_same_gradients(expected, gradients(model, losses))


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_checkpoints_of_transformers_are_refused_before_a_backward_pass(family):
    model = FAMILIES[family]().train()
    tokens = gathered(random_batch(LENGTHS))
    with hoist(model) as hoisted:
        hoisted.row_losses(tokens)
        checkpoint_activations(model, reentrant=False)
        with pytest.raises(SparsityError, match="does not support gradient checkpointing"):
            hoisted.row_losses(tokens)
    with pytest.raises(SparsityError, match="pass `checkpoints`"):
        hoist(model)
    model(input_ids=torch.arange(8)[None])


@pytest.mark.parametrize("family", FAMILIES)
def test_its_trial_accepts_it(family):
    sequences = [list(range(5, 60)), list(range(9, 40)), [3, 4]]
    hoisted, reason = hoist_if_exact(FAMILIES[family](), sequences, 2)
    assert reason is None
    hoisted.remove()


@pytest.mark.parametrize(("family", "path"), [("granite-hybrid", "mamba.norm"), ("qwen3.5", "linear_attn.norm")])
def test_norms_with_a_gate_run_on_our_operations(family, path):
    model = FAMILIES[family]().double()
    norm = model.model.layers[0].get_submodule(path)
    replacement, size = dict(SmallOps(model).replacements())[norm], len(norm.weight)
    torch.nn.init.normal_(norm.weight)
    x, gate, dout = torch.randn(3, 1, 5, size, dtype=torch.float64)
    inputs = [x.requires_grad_(), gate.requires_grad_(), norm.weight]
    expected, found = norm(x, gate), replacement(x, gate=gate)
    # They compute in fp32 in any model.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(out, inputs, dout) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_norm_whose_gate_is_optional_still_does_without():
    norm = FAMILIES["granite-hybrid"]().model.layers[0].mamba.norm
    x = torch.randn(1, 5, len(norm.weight))
    assert torch.equal(_GatedNorm(norm, comes_first=False)(x), norm(x))


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_filler_of_a_bucket_changes_no_loss(family):
    model, tokens = FAMILIES[family](), gathered(random_batch(LENGTHS))
    bucket = Bucket(64, 8, 32, 48)
    with torch.no_grad(), hoist(model) as hoisted:
        expected = hoisted.row_losses(tokens)
        found = hoisted.row_losses(tokens.filled(bucket))
    torch.testing.assert_close(found[: len(expected)], expected)


def test_where_texts_are_follows_from_the_sizes_without_reading_the_device():
    tokens = [gathered(random_batch(lengths)).to("meta") for lengths in ((9, 3, 3), (9, 4, 2))]
    with hoist(FAMILIES["lfm2"]()) as hoisted:
        one, other = map(hoisted._restarts.texts_of, tokens)
    assert one.positions_A.shape == other.positions_A.shape == (12,)
    assert one.chunks.texts_N.shape == other.chunks.texts_N.shape
