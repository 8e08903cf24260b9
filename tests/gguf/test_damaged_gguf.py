"""Damaged and hostile GGUF files are refused with one sentence, in little memory."""

import os
import random
import resource
import struct
import sys

import pytest
import torch
from builders import SIZES, load_base, make_llama, make_tokenizer
from command import process
from gguf import GGUFReader
from gguf_files import Kind, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from sebp_edge.errors import ModelError, SebpEdgeError

# So many in this suite; SEBP_EDGE_DAMAGED_FILES asks for more.
NUM_FILES = int(os.environ.get("SEBP_EDGE_DAMAGED_FILES", 100))
MEMORY = 400_000_000
LIES = [0, 1, 2, 3, 5, 8, 9, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", make_llama(), make_tokenizer(), Kind.Q8_0)


def refusal(path) -> str | None:
    """Returns the message of the error that a file raises, or None."""
    try:
        load_base(path)
    except SebpEdgeError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 500 and message.endswith("."), message
        return message
    return None


def damaged(content: bytes, data_start: int, draw: random.Random) -> bytes:
    """Truncates a file, or changes bytes or numbers of its table."""
    changed = bytearray(content)
    match draw.choice(["truncate", "bytes", "number", "number", "swap"]):
        case "truncate":
            del changed[draw.choice([draw.randrange(len(content)), draw.randrange(data_start)]) :]
        case "bytes":
            for _ in range(draw.choice([1, 3, 20])):
                changed[draw.randrange(data_start)] = draw.randrange(256)
        case "number":
            width = draw.choice(["<I", "<Q"])
            at = draw.randrange(data_start - 8)
            struct.pack_into(width, changed, at, draw.choice(LIES) % 2 ** (8 * struct.calcsize(width)))
        case "swap":
            a, b, length = draw.randrange(data_start - 50), draw.randrange(data_start - 50), draw.randrange(50)
            changed[a : a + length], changed[b : b + length] = changed[b : b + length], changed[a : a + length]
    return bytes(changed)


@pytest.mark.slow
def test_damaged_files_are_refused_with_one_sentence_in_little_memory(whole, tmp_path):
    content = whole.read_bytes()
    # Most of the table is the vocabulary; damage at its ends hits counts, keys, names, shapes and offsets.
    ends = [GGUFReader(whole).data_offset, 1500]
    load_base(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draw, refused = random.Random(0), 0
    path = tmp_path / "model.gguf"
    for _ in range(NUM_FILES):
        path.write_bytes(damaged(content, draw.choice(ends), draw))
        refused += refusal(path) is not None
    assert refused > NUM_FILES / 2
    kilobytes = 1 if sys.platform == "linux" else 1 / 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * kilobytes < MEMORY / 1024


def header(num_tensors=0, *values, version=3, num_keys=None):
    counts = num_tensors, len(values) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name="x", shape=(32,), kind=0, offset=0, dimensions=None):
    numbers = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", dimensions or len(shape)) + numbers + struct.pack("<IQ", kind, offset)


LYING = {
    "empty": (b"", "does not begin with"),
    "another format": (b"PK\x03\x04" * 20, "does not begin with"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "countless tensors": (header(2**60), "1.15292e\\+18 tensors"),
    "countless keys": (header(num_keys=2**63), "metadata keys"),
    "missing keys": (header(num_keys=60_000), "ends within its metadata"),
    "a long text": (header(0, key("a", 8, struct.pack("<Q", 2**62))), "ends within"),
    "a long array": (header(0, key("a", 9, struct.pack("<IQ", 4, 2**61))), "elements"),
    "an array of texts": (header(0, key("a", 9, struct.pack("<IQ", 8, 2**20))), "ends within"),
    "an array in an array": (header(0, key("a", 9, struct.pack("<IQ", 9, 1))), "unknown type 9"),
    "an unknown type": (header(0, key("a", 77, b"")), "unknown type 77"),
    "no text": (header(0, key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "not UTF-8"),
    "alignment 0": (header(0, key("general.alignment", 4, struct.pack("<I", 0))), "alignment"),
    "alignment 3": (header(0, key("general.alignment", 4, struct.pack("<I", 3))), "alignment"),
    "no dimension": (header(1, tensor(shape=()), num_keys=0), "0 dimensions"),
    "many dimensions": (header(1, tensor(dimensions=2**31), num_keys=0), "dimensions"),
    "a huge shape": (header(1, tensor(shape=(2**63, 2**63)), num_keys=0), "has the shape"),
    "an odd row": (header(1, tensor(shape=(33,), kind=8), num_keys=0) + bytes(500), "has the shape"),
    "beyond the end": (header(1, tensor(shape=(64,)), num_keys=0) + bytes(64), "tensors need"),
    "a far offset": (header(1, tensor(offset=2**50), num_keys=0), "tensors need"),
    "a crooked offset": (header(1, tensor(offset=7), num_keys=0) + bytes(500), "overlap or are not aligned"),
    "on top of each other": (header(2, tensor("a") + tensor("b"), num_keys=0) + bytes(500), "overlap"),
    "the same name": (header(2, tensor() + tensor(offset=128), num_keys=0) + bytes(500), "same name"),
    "no architecture": (header() + bytes(64), "of the family ''"),
}


@pytest.mark.parametrize("name", LYING)
def test_lying_headers_are_refused(name, tmp_path):
    content, message = LYING[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_base(path)
    assert refusal(path)


def test_pipes_folders_and_unreadable_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        load_base(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match="contains no model"):
        load_base(tmp_path / "folder.gguf")
    with pytest.raises(ModelError, match=r"There is no GGUF file 'missing\.gguf'"):
        load_base("missing.gguf")
    with pytest.raises(ModelError, match="There is no GGUF file"):
        load_base(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "family 'mamba'; expected llama, qwen2"),
        ({"general__type": "adapter"}, "contains a GGUF adapter, not a model"),
        ({"split__count": 3}, "part of a split model"),
        ({"arch__expert_count": 8}, "mixture of experts"),
        ({"arch__rope__scaling__type": "yarn"}, "scales positions by 'yarn'"),
        ({"arch__rope__dimension_count": 4}, "rotates 4 of 8 features"),
        ({"arch__rope__freq_base": float("nan")}, "freq_base nan; expected a positive number"),
        ({"arch__block_count": 2**31 - 1}, "num_hidden_layers 2.14748e\\+09"),
        ({"arch__block_count": 3}, "lacks 'model.layers.2"),
        ({"arch__block_count": 1}, "has 'blk.1.attn_norm.weight', which its config does not have"),
        ({"arch__embedding_length": 64}, "of shape"),
        ({"arch__attention__head_count": 0}, "head_count 0; expected a positive number"),
        ({"arch__attention__head_count": "four"}, "of type str; expected int"),
        ({"arch__attention__head_count": 3}, "of 'model.gguf' is damaged: The hidden size .* not a multiple of"),
        (
            {"without": "blk.0.attn_q.weight", "tensors": {"blk.0.attn_q.weight": [1.0]}},
            r"of shape \[1\], expected \[32",
        ),
        ({"tokenizer__ggml__padding_token_id": 2**31 - 1}, "the padding token 2147483647, but only 320 tokens"),
        ({"tensors": {"v.patch_embd.weight": [1.0]}}, "vision or audio layers"),
        ({"tensors": {"blk.0.ssm_a": [1.0]}}, "the tensor 'blk.0.ssm_a'"),
        ({"tensors": {"rope_freqs.weight": [1.0, 2.0, 1.0, 3.0]}}, "a way that is not known"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 1000}}, "1000 factors of positions, not 4"),
        ({"arch__rope__dimension_count": 2**30}, "expected at most 4096"),
        ({"tokenizer__ggml__tokens": None}, "has no tokenizer"),
        ({"tokenizer__ggml__tokens": ["a" * 2000] * 320}, "tokens that are too long"),
    ],
)
def test_models_that_cannot_be_read_are_refused(changes, message, tokenizer, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_llama(), tokenizer, **changes)
    with pytest.raises(ModelError, match=message):
        load_base(path)


def test_types_that_cannot_be_dequantised_are_refused_with_the_list(whole, tmp_path):
    content = bytearray(whole.read_bytes())
    size = SIZES["hidden_size"], SIZES["intermediate_size"]
    at = content.index(text("blk.0.ffn_up.weight") + struct.pack("<I2Q", 2, *size)) + 8 + 19 + 4 + 16
    struct.pack_into("<I", content, at, 20)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="tensors of type IQ4_NL; expected F32, F16, Q4_0"):
        load_base(path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    path = write_gguf(tmp_path / "model.gguf", model, make_tokenizer(), tokenizer__ggml__bos_token_id=0)
    with pytest.raises(ModelError, match=r"NaN or infinity, in the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_base(path)


@pytest.mark.slow
def test_the_command_line_refuses_a_damaged_file_without_a_traceback(tmp_path, notes_folder):
    path = tmp_path / "model.gguf"
    path.write_bytes(header(2**60))
    with process("adapt", notes_folder, "--model", path) as one:
        _, errors = one.communicate(timeout=60)
    assert one.returncode == 1
    assert "not a usable GGUF file" in errors and "Traceback" not in errors
