"""Makes small random models of many families."""

from contextlib import contextmanager

import pytest
from builders import SIZES, make_llama, seeded
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    DistilBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    RobertaConfig,
    xLSTMConfig,
)


def no_defaults() -> dict:
    """Settings that no program takes by default, so that one that is lost changes what a model computes."""
    return {"rms_norm_eps": 1e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}


@contextmanager
def large_tables(least):
    """Context in which embeddings of so many numbers are lookup tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sebp_edge.engine.models.architecture.LARGE_TABLE", least)
        yield


def make_model(config, attention="sdpa"):
    with seeded(1):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def make_gemma4(**changes):
    """Two of its six layers read the keys and values of others, and its layers have heads of two sizes."""
    sizes = SIZES | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    sizes |= {"head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "num_kv_shared_layers": 2}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZES["vocab_size"]}
    return make_model(Gemma4TextConfig(**sizes | changes))


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MODELS = {
    "llama": make_llama,
    "qwen3": lambda: make_model(Qwen3Config(**SIZES, **no_defaults(), head_dim=8)),
    "mistral": lambda: make_model(MistralConfig(**SIZES, **no_defaults(), sliding_window=5)),
    # Only transformers' eager attention has a softcap; in fp64 it gives NaN for padding rows that see no key.
    "gemma2": lambda: make_model(
        Gemma2Config(
            **SIZES,
            head_dim=8,
            sliding_window=24,
            attn_logit_softcapping=0.7,
            final_logit_softcapping=1.5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "eager",
    ),
    "gemma3": lambda: make_model(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ),
    "phi3": lambda: make_model(Phi3Config(**SIZES, **no_defaults())),
}
# Their states must restart at each text.
WITH_STATES = {
    "lfm2": lambda: make_model(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], conv_L_cache=3)),
    "qwen3.5": lambda: make_model(Qwen3_5TextConfig(**SIZES, head_dim=8, **LINEAR)),
    # Its attention has no positions.
    "granite-hybrid": lambda: make_model(
        GraniteMoeHybridConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            shared_intermediate_size=48,
            num_local_experts=0,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            position_embedding_type="nope",
        )
    ),
}
# Models of five blocks of no known kind: with convolutions, linear attention, keys of other blocks, and state spaces.
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
OF_NO_KNOWN_KIND = {
    "lfm2": {"layer_types": [kind.replace("linear_attention", "conv") for kind in KINDS]},
    "qwen3_5_text": {
        "layer_types": KINDS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gemma4_text": {
        "layer_types": [kind.replace("linear", "sliding") for kind in KINDS],
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
    },
    "granitemoehybrid": {
        "layer_types": KINDS,
        "shared_intermediate_size": 192,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,
    },
}


def make_of_no_known_kind(family):
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": len(KINDS), "head_dim": 16}
    return make_model(AutoConfig.for_model(family, **sizes | OF_NO_KNOWN_KIND[family]))


SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 2}
NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
BERT = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads",)} | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
DISTILBERT = {"vocab_size": 320, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "num_labels": 3}
NO_DROPOUT_DISTILBERT = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
    "pad_token_id": 2,
}
DECODERS = {
    "qwen2": lambda: Qwen2Config(**SIZES, **no_defaults()),
    "qwen3": lambda: Qwen3Config(**SIZES, **no_defaults(), head_dim=8),
    "mistral": lambda: MistralConfig(**SIZES, **no_defaults(), sliding_window=5),
    # The window is wide because the dense model's eager attention gives NaN in a window without a real token.
    "gemma2": lambda: Gemma2Config(
        **SIZES, **no_defaults(), head_dim=8, sliding_window=24, final_logit_softcapping=1.5
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8, **SLIDING),
    "phi": lambda: PhiConfig(**SIZES, resid_pdrop=0.0),
    "phi3": lambda: Phi3Config(**SIZES, **no_defaults()),
    "gpt2": lambda: GPT2Config(**GPT2, **NO_DROPOUT_GPT2),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=3.0),
    "gpt-neox": lambda: GPTNeoXConfig(**(SIZES | {"num_key_value_heads": 4}), hidden_dropout=0.0),
    "recurrent-gemma": lambda: RecurrentGemmaConfig(**(SIZES | {"num_hidden_layers": 3}), logits_soft_cap=1.5),
    "xlstm": lambda: xLSTMConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_heads=2, output_logit_soft_cap=1.5, pad_token_id=2,
        use_cache=False,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=320, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=2,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0,
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: BertConfig(**BERT),
    "roberta": lambda: RobertaConfig(**BERT),
    "distilbert": lambda: DistilBertConfig(**DISTILBERT, **NO_DROPOUT_DISTILBERT),
}


def make(kind, config):
    """Makes a model in training mode, in fp64."""
    with seeded(2):
        return kind.from_config(config).double().train()


def make_decoder(family, **changes):
    config = DECODERS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return make(AutoModelForCausalLM, config)


FAMILIES = ("bert", "roberta", "distilbert")
# Heads of size 32, which our attention kernels support, and positions for longer texts.
WIDE = {"hidden_size": 128, "max_position_embeddings": 256}
WIDER = {"bert": WIDE, "roberta": WIDE, "distilbert": {"dim": 128, "max_position_embeddings": 256}}
