"""The shape of a large model, and machines that it is planned for."""

import pytest
import torch
from transformers import LlamaConfig

from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import resolve


@pytest.fixture(scope="session")
def shape_3b(tmp_path_factory):
    """The shape of a 3B Llama, read from its config."""
    folder = tmp_path_factory.mktemp("models") / "llama-3b"
    sizes = {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    LlamaConfig(**sizes, **heads).save_pretrained(folder)
    return read_shape(resolve(folder))


@pytest.fixture
def gpu_with_bf16(machine):
    """Simulates an NVIDIA GPU with bf16 for plans, on any machine."""
    machine.computes_in(torch.bfloat16)
    machine.multiplies(700e12)
    machine.has_memory(64e9)
    machine.has_libraries(triton=True, bitsandbytes=False)


@pytest.fixture
def has_bitsandbytes(gpu_with_bf16, machine):
    machine.has_libraries(triton=True, bitsandbytes=True)
