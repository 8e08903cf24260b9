"""Models in llama2.c's format: the weights and the tokenizer are found where the format has them."""

import struct

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llama2c

SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
POSITIONS, VOCABULARY = 64, 40


def written(tmp_path, model, *, tied, version=1):
    """The model's weights as a checkpoint, rows of q and k as they are."""
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    sizes += (config.num_key_value_heads, VOCABULARY, POSITIONS)
    header = struct.pack("<II7iB", llama2c.MAGIC, version, *sizes, tied)
    weights = torch.cat([parameter.detach().flatten() for parameter in llama2c.in_order(model, tied)])
    path = tmp_path / "model.bin"
    path.write_bytes(header.ljust(llama2c.WEIGHTS_BEGIN, b"\0") + weights.numpy().tobytes())
    return path


def make(tied):
    torch.manual_seed(0)
    about = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **about, **SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_weight_comes_back(tmp_path, tied):
    model = make(tied)
    found = llama2c.read_model(written(tmp_path, model, tied=tied))
    for (name, expected), (_, weight) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        is_reordered = ".q_proj" in name or ".k_proj" in name
        assert torch.equal(weight, expected) != is_reordered
    assert found.config.tie_word_embeddings == tied


def test_rotated_scores_are_those_of_neighbouring_pairs():
    """q·k after the rotation of pairs (0, 1), (2, 3), ... is q·k after transformers' rotation of the turned rows."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=POSITIONS, **SIZES)
    heads, size, time = 4, 8, 7
    x_TD, weights = torch.randn(time, 32), torch.randn(2, heads * size, 32)
    angles = torch.arange(time)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    rotations = torch.polar(torch.ones_like(angles), angles)
    query, key = (
        torch.view_as_complex((x_TD @ weight.T).view(time, heads, size // 2, 2)) * rotations[:, None]
        for weight in weights
    )
    expected = torch.einsum("thc,shc->hts", query, key.conj()).real
    cos, sin = LlamaRotaryEmbedding(config)(x_TD, torch.arange(time)[None])
    query, key = (
        (x_TD @ llama2c.halves(weight, heads).T).view(1, time, heads, size).transpose(1, 2) for weight in weights
    )
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    torch.testing.assert_close((query @ key.mT)[0], expected, rtol=1e-4, atol=1e-4)


def test_another_version_or_length_is_refused(tmp_path):
    model = make(tied=True)
    with pytest.raises(ValueError, match=r"no llama2\.c checkpoint of version 1"):
        llama2c.read_model(written(tmp_path, model, tied=True, version=2))
    path = written(tmp_path, model, tied=True)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="its sizes make another number"):
        llama2c.read_model(path)


def test_texts_are_merged_by_score_and_come_back(tmp_path):
    tokens = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    pieces = [" ", "a", "b", "c", "ab", " ab", "bc", "abc"]
    tokens += [(piece, -float(number)) for number, piece in enumerate(pieces)]
    packed = (struct.pack("<fi", score, len(text.encode())) + text.encode() for text, score in tokens)
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(struct.pack("<i", 6) + b"".join(packed))
    tokenizer = llama2c.read_tokenizer(path, len(tokens))
    assert tokenizer.tokenize("ab abc") == ["▁ab", "▁ab", "c"]
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(tokenizer("ab é cab")["input_ids"], skip_special_tokens=True) == "ab é cab"
