"""Converts a model in llama2.c's format (version 1) to a folder that transformers loads.

    python kernels/bench/llama2c.py CHECKPOINT TOKENIZER FOLDER

CHECKPOINT begins with "ak42" and the version, then seven sizes and a flag (whether the head is tied to the embedding).
The weights follow from byte 256 in fp32: all norms, the embedding, then q, k, v, o, gate, down and up, each for all
layers. TOKENIZER holds the length of the longest token, then the score, length and text of each token; a higher score
means an earlier merge. llama2.c rotates neighbouring pairs and transformers rotates halves, so the rows of q and k are
reordered. Source of the format: export.py and run.c of github.com/karpathy/llama2.c.
"""

import argparse
import struct
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAGIC, VERSION, WEIGHTS_BEGIN = 0x616B3432, 1, 256
UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("checkpoint", "tokenizer", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    model = read_model(options.checkpoint)
    model.save_pretrained(options.folder)
    read_tokenizer(options.tokenizer, model.config.vocab_size).save_pretrained(options.folder)
    print(f"{model.num_parameters():,} parameters are in {options.folder}.")


def read_model(checkpoint: Path) -> LlamaForCausalLM:
    """Reads a checkpoint.

    Raises:
        ValueError: the file is not of version 1, or has too few or too many weights.
    """
    data = checkpoint.read_bytes()
    magic, version, hidden, mlp, layers, heads, kv_heads, vocabulary, positions, tied = struct.unpack_from(
        "<II7iB", data
    )
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{checkpoint.name} is no llama2.c checkpoint of version {VERSION}; export it as one.")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=bool(tied),
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    weights = torch.frombuffer(bytearray(data[WEIGHTS_BEGIN:]), dtype=torch.float32)
    parameters = in_order(model, bool(tied))
    if weights.numel() != sum(parameter.numel() for parameter in parameters):
        raise ValueError(f"{checkpoint.name} has {weights.numel()} weights, and its sizes make another number.")
    for parameter, values in zip(
        parameters, weights.split([parameter.numel() for parameter in parameters]), strict=True
    ):
        parameter.data.copy_(values.view(parameter.shape))
    for layer in model.model.layers:
        for linear, number in ((layer.self_attn.q_proj, heads), (layer.self_attn.k_proj, kv_heads)):
            linear.weight.data = halves(linear.weight.data, number)
    return model


def in_order(model: LlamaForCausalLM, tied: bool) -> list[Tensor]:
    """The parameters in the order of the file."""
    layers = model.model.layers
    norms = [layer.input_layernorm.weight for layer in layers] + [
        layer.post_attention_layernorm.weight for layer in layers
    ]
    attention = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo" for layer in layers]
    mlp = [getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "down", "up") for layer in layers]
    head = [] if tied else [model.lm_head.weight]
    return [*norms, model.model.norm.weight, model.model.embed_tokens.weight, *attention, *mlp, *head]


def halves(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head: 0, 2, 4, ..., then 1, 3, 5, ..."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_tokenizer(path: Path, size: int) -> PreTrainedTokenizerFast:
    data, tokens, begin = path.read_bytes(), [], 4
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, begin)
        begin += 8 + length
        tokens.append((data[begin - length : begin].decode().replace(" ", "▁"), score))
    names = [UNKNOWN, BOS, EOS, *(token for token, _ in tokens[3:])]
    vocabulary = {token: number for number, token in enumerate(names)}
    scores = dict(tokens[3:])
    merges = [(token[:cut], token[cut:]) for token in scores for cut in range(1, len(token))]
    merges = [pair for pair in merges if scores.keys() >= set(pair) and not "".join(pair).startswith("<0x")]
    merges.sort(key=lambda pair: -scores["".join(pair)])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BOS, eos_token=EOS)


if __name__ == "__main__":
    main()
