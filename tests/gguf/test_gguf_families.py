"""Each family's models read from GGUF files compute what their originals do."""

import math

import pytest
import torch
from builders import SIZES, load_base, make_tokenizer, shape_of
from gguf_files import ARCHITECTURES, write_gguf
from llama_cpp import ask_llama_cpp
from model_families import make_model
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from sebp_edge.errors import ModelError

IDS = torch.randint(7, 320, (1, 60), generator=torch.Generator().manual_seed(0))
NAMES = {"bos_token_id": 0, "eos_token_id": 1}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 40,
    "attention_factor": 1.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Linear attention with heads of the size that llama.cpp takes.
QUARTER = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
DELTA = SIZES | NAMES | {"head_dim": 16, "rope_parameters": QUARTER}
DELTA |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
# Kinds of layers with heads of different sizes; the last layers have the keys and values of earlier ones.
WINDOWED = {"layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 6}
GEMMA4 = SIZES | NAMES | WINDOWED | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24}
GEMMA4["rope_parameters"] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, **NAMES, tie_word_embeddings=False),
    "llama with biases": lambda: LlamaConfig(**SIZES, **NAMES, attention_bias=True, mlp_bias=True),
    "llama with wide heads": lambda: LlamaConfig(**SIZES, **NAMES, head_dim=16),
    "llama with linear scaling": lambda: LlamaConfig(
        **SIZES, **NAMES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama with Llama 3.1's scaling": lambda: LlamaConfig(**SIZES, **NAMES, head_dim=16, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SIZES, **NAMES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, **NAMES),
    "qwen3": lambda: Qwen3Config(**SIZES, **NAMES, head_dim=16),
    "smollm3": lambda: SmolLM3Config(**(SIZES | {"num_hidden_layers": 4}), **NAMES),
    "phi3": lambda: Phi3Config(**SIZES, **NAMES, sliding_window=100, tie_word_embeddings=False),
    "phi3, partly rotated": lambda: Phi3Config(
        **SIZES, **NAMES,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "phi3 with long contexts": lambda: Phi3Config(
        **SIZES, **NAMES, rope_parameters=LONG, original_max_position_embeddings=40
    ),
    "gemma": lambda: GemmaConfig(**SIZES, **NAMES, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **SIZES, **NAMES, head_dim=16, query_pre_attn_scalar=16, sliding_window=24, attn_logit_softcapping=9.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 6}), **NAMES, head_dim=16, query_pre_attn_scalar=16, sliding_window=24,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=320, final_logit_softcapping=7.0,
    ),
    "gemma4 with keys as values": lambda: Gemma4TextConfig(
        **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=320,
    ),
    "lfm2": lambda: Lfm2Config(
        **(SIZES | {"num_hidden_layers": 3}), **NAMES, norm_eps=1e-4, conv_L_cache=4,
        layer_types=["conv", "full_attention", "conv"], block_multiple_of=16,
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**DELTA | {"num_hidden_layers": 4}, linear_num_value_heads=2),
    "qwen3.5 with shared keys": lambda: Qwen3_5TextConfig(
        **DELTA | {"num_hidden_layers": 3}, linear_num_value_heads=6, full_attention_interval=3
    ),
}  # fmt: skip


def llama3_factors():
    """Yields Llama 3.1's factors, as llama.cpp's converter computes them."""
    for pair in range(8):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (2 * pair / 16)
        if wavelength < 8192 / 4:
            yield 1.0
        elif wavelength > 8192 / 1:
            yield 8.0
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            yield 1 / ((1 - smooth) / 8 + smooth)


# What else the file of a case contains.
FURTHER = {
    "llama with linear scaling": {"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": 2.0},
    "llama with Llama 3.1's scaling": {"tensors": {"rope_freqs.weight": list(llama3_factors())}},
    "gemma4": {"tensors": {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}},
    "gemma4 with keys as values": {
        "tensors": {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12},
        "arch__final_logit_softcapping": 0.0,
    },
    "lfm2": {"arch__feed_forward_length": 32},
    "phi3 with long contexts": {
        "arch__rope__scaling__original_context_length": 40,
        "arch__rope__scaling__attn_factor": 1.2,
        "tensors": {f"rope_factors_{name}.weight": LONG[f"{name}_factor"] for name in ("long", "short")},
    },
}


def make(case):
    model = make_model(CONFIGS[case](), "eager")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for key, weight in model.named_parameters():
            # Norms and biases differ from their start, so that a lost one shows; matrices are large enough to matter.
            noise = torch.randn_like(weight)
            weight.copy_(noise * 0.1 if weight.dim() > 1 else weight + noise * 0.2)
            if case.startswith("gemma4") and key.endswith("q_norm.weight"):
                weight *= 0.2  # Gemma 4 scales scores by nothing else; sharp ones multiply what llama.cpp rounds
        for key, scale in model.named_buffers():
            if key.endswith("layer_scalar"):
                scale.fill_(0.7)
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """A random model's name, the model, its GGUF file, and the base model that is read from it."""
    model = make(request.param)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, model, make_tokenizer(), **FURTHER.get(request.param, {}))
    return request.param, model, path, load_base(path)


@torch.no_grad()
def test_a_model_of_each_family_computes_what_its_original_does(case):
    _, model, _, base = case
    assert base.num_parameters == model.num_parameters()
    torch.testing.assert_close(base.model(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_every_family_has_a_case(tokenizer, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make(next(iter(CONFIGS))), tokenizer, general__architecture="none")
    with pytest.raises(ModelError) as refusal:
        load_base(path)
    listed = str(refusal.value).partition("expected ")[2].removesuffix(".").split(", ")
    families = {config().model_type for config in CONFIGS.values()}
    assert {ARCHITECTURES.get(family, family) for family in families} == set(listed)


@torch.no_grad()
def test_llama_cpp_computes_what_the_read_model_does(case):
    pytest.importorskip("xllamacpp")
    name, _, path, base = case
    if name == "phi3 with long contexts":
        pytest.skip("llama.cpp chooses between both factors by the largest context, and transformers by the text")
    prompts = [IDS[0, :length].tolist() for length in (1, 9, 60)]
    _, answers = ask_llama_cpp(path, prompts=prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = base.model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
        ids = [token for token, _ in answer]
        assert len(ids) == 20
        torch.testing.assert_close(
            torch.tensor([logprob for _, logprob in answer]), expected[ids], rtol=0, atol=5e-3, msg=name
        )


def write_gemma4(tmp_path, tokenizer, **changes):
    further = FURTHER["gemma4"] | changes
    tensors = {"tensors": FURTHER["gemma4"]["tensors"] | changes.get("tensors", {})}
    return write_gguf(tmp_path / "model.gguf", make("gemma4"), tokenizer, **further | tensors)


@torch.no_grad()
def test_keys_of_layers_that_share_those_of_others_are_not_read(tokenizer, tmp_path):
    """Gemma 4's checkpoints have them, and so have the files that are made of these."""
    keys = {f"blk.4.attn_{name}.weight": torch.randn(32, 32).tolist() for name in ("k", "v")}
    base = load_base(write_gemma4(tmp_path, tokenizer, tensors=keys | {"blk.4.attn_k_norm.weight": [1.0] * 16}))
    torch.testing.assert_close(base.model(IDS).logits, make("gemma4")(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "blk.1.inp_gate.weight"}, "lacks 'model.layers.1.per_layer_input_gate.weight'"),
        ({"without": "blk.2.layer_output_scale.weight"}, "lacks 'model.layers.2.layer_scalar'"),
        ({"without": "blk.0.attn_k.weight"}, "lacks 'model.layers.0.self_attn.k_proj.weight'"),
        ({"without": "blk.1.attn_v.weight"}, "lacks 'model.layers.1.self_attn.v_proj.weight'"),
        ({"without": "per_layer_token_embd.weight"}, "lacks 'model.embed_tokens_per_layer.weight'"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 4 + [8.0] * 12}}, "scales positions in a way that is not known"),
        ({"arch__rope__scaling__type": "linear"}, "scales positions by 'linear'; expected none"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 8}}, "8 factors of positions, not 16"),
        ({"tensors": {"a.blk.0.ffn_up.weight": [1.0]}}, "vision or audio layers"),
        ({"tensors": {"v.blk.0.ffn_up.weight": [1.0]}}, "vision or audio layers"),
        ({"general__type": "mmproj"}, "contains a GGUF mmproj, not a model"),
        ({"general__architecture": "gemma4-assistant"}, "of the family 'gemma4-assistant'"),
        ({"arch__expert_count": 128}, "mixture of experts"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": [1.0]}}, "the tensor 'blk.0.ffn_gate_inp.weight'"),
        ({"arch__attention__sliding_window_pattern": None}, "sliding_window_pattern None; expected"),
        ({"arch__attention__sliding_window_pattern": 6}, "sliding_window_pattern 6; expected"),
        ({"arch__attention__sliding_window_pattern": [True] * 5}, "expected a number for all or each layer"),
        ({"arch__attention__sliding_window_pattern": [True] * 6}, "sliding windows in other layers than Gemma 4"),
        ({"arch__attention__sliding_window_pattern": [False] * 6}, "expected a number for all or each layer"),
        ({"arch__attention__shared_kv_layers": 2}, "sliding windows in other layers than Gemma 4"),
        ({"arch__attention__shared_kv_layers": 2**31}, "sliding windows in other layers than Gemma 4"),
        ({"arch__attention__key_length_swa": None}, "key_length_swa None; expected a positive number"),
        ({"arch__attention__head_count_kv": 1}, "of shape"),
        ({"arch__feed_forward_length": [96] * 6}, "of shape"),
        ({"arch__feed_forward_length": ["a"] * 6}, "expected a number for all or each layer"),
        ({"arch__rope__dimension_count_swa": 8}, "rotates a part of a head's features"),
        ({"arch__embedding_length_per_layer_input": 12}, "of shape"),
        ({"arch__embedding_length_per_layer_input": 0}, "which its config does not have"),
    ],
)
def test_files_of_gemma_4_that_cannot_be_read_are_refused(changes, message, tokenizer, tmp_path):
    with pytest.raises(ModelError, match=message) as refusal:
        load_base(write_gemma4(tmp_path, tokenizer, **changes))
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_the_shape_is_known_before_the_file_is_loaded(case):
    name, model, path, _ = case
    shape = shape_of(path)
    assert shape.parameters == model.num_parameters()
    assert shape.longest == model.config.max_position_embeddings
    assert shape.is_hoisted, name
