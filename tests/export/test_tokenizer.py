"""Tokenizers in GGUF: llama.cpp reads texts as the same tokens, and unknown rules are refused."""

import json
import unicodedata
from pathlib import Path

import pytest
from builders import WORDS, make_tokenizer
from export_sources import long_texts, make_adapter, make_source
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sebp_edge import Personalizer
from sebp_edge.errors import ExportError
from sebp_edge.export.gguf_tokenizer import GgufTokenizer
from sebp_edge.values.model_reference import BUNDLED_FOLDER

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_OF_GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TEXTS = [
    "The ferry's at 18:30, not 1930; WE'LL take it.\n\n  Two spaces,\ttab, naïve café, 北京 🙂!\r\n",
    "x = {'a': [1, 23, 456, 7890]}  # ok…\n    return x\n",
    " leading space and trailing ",
]


def split(regex):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), BYTES])


BYTE_LEVEL = {
    "llama-bpe": (split(LLAMA_3), True),
    "qwen2": (split(QWEN_2), False),
    "tekken": (split(TEKKEN), True),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS_OF_GPT_2]), False),
    "gpt-2": (WORDS_OF_GPT_2, False),
}


def train(pre_tokenizer, ignore_merges=False):
    """A byte-level tokenizer with these rules, trained on the tests' texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, **options))
    return with_bos(tokenizer)


def with_bos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def sentencepiece(*, prefix):
    """A tokenizer like those of SentencePiece: with a token for each byte, and spaces as letters."""
    special = ["<|bos|>", "<|eos|>", "<|pad|>", "<unk>"]
    vocab = {text: number for number, text in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = []
    for letter in sorted(set("".join(WORDS)) | {"▁", ".", ","}):
        vocab[letter] = len(vocab)
    for pair in [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("w", "e"), ("s", "o"), ("▁", "a"), ("▁a", "n")]:
        vocab["".join(pair)] = len(vocab)
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    return with_bos(tokenizer)


def export(tokenizer, tmp_path, family="llama"):
    model = make_source(tmp_path / "model", family, tokenizer)
    adapter = make_adapter(tmp_path / "adapter", model)
    return Personalizer(model, device="cpu").export(adapter, tmp_path / "out", texts=[*TEXTS, *long_texts()])


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_pre_tokenizer_has_the_name_that_llama_cpp_knows(name):
    assert GgufTokenizer(train(*BYTE_LEVEL[name]), 320, "llama")._pre == name


@pytest.mark.slow
def test_llama_cpp_reads_the_same_tokens(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    assert export(train(*BYTE_LEVEL["llama-bpe"]), tmp_path).read_back_by == "llama.cpp"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "prefix"), [("llama", True), ("llama", False), ("gemma4", False)])
def test_llama_cpp_reads_the_same_tokens_of_sentencepiece(tmp_path, family, prefix):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    assert export(sentencepiece(prefix=prefix), tmp_path, family).read_back_by == "llama.cpp"


def test_merges_in_any_order_are_written_for_gemma_4_and_refused_for_others():
    tokenizer = sentencepiece(prefix=False)
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    values["model"]["merges"].append(["t", "he"])
    values["model"]["merges"].insert(1, ["h", "e"])
    values["model"]["vocab"]["he"] = len(values["model"]["vocab"])
    tokenizer = with_bos(Tokenizer.from_str(json.dumps(values)))
    writer = GGUFWriter(None, "gemma4")
    GgufTokenizer(tokenizer, 320, "gemma4").add(writer)
    assert writer.kv_data[0]["tokenizer.ggml.merges"].value[:3] == ["t h", "h e", "th e"]
    with pytest.raises(ExportError, match="whose merges have no order of tokens"):
        GgufTokenizer(tokenizer, 320, "llama")


@pytest.mark.slow
def test_decomposed_characters_are_composed_if_the_tokenizer_does(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    tokenizer = train(*BYTE_LEVEL["qwen2"]).backend_tokenizer
    tokenizer.normalizer = normalizers.NFC()
    model = make_source(tmp_path / "model", "llama", with_bos(tokenizer))
    adapter = make_adapter(tmp_path / "adapter", model)
    texts = [unicodedata.normalize("NFD", TEXTS[0]), *long_texts()]
    assert Personalizer(model, device="cpu").export(adapter, tmp_path / "out", texts=texts).read_back_by == "llama.cpp"


@pytest.mark.slow
def test_other_tokens_are_found(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    monkeypatch.setattr(GgufTokenizer, "_byte_level_name", lambda self: "qwen2")
    with pytest.raises(ExportError, match=r"llama\.cpp reads \d of 4 texts as other tokens"):
        export(train(*BYTE_LEVEL["llama-bpe"]), tmp_path)


@pytest.mark.parametrize(
    ("part", "rules", "ignore_merges", "words"),
    [
        ("pre_tokenizer", split(r"\p{L}+|\s+"), False, "with these rules: split"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), False, "with these rules: Whitespace"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), False, "with these rules: ByteLevel"),
        ("pre_tokenizer", split(QWEN_2), True, "with the rules 'qwen2' and ignore_merges True"),
        ("normalizer", normalizers.Lowercase(), False, "with these rules: Lowercase"),
    ],
)
def test_unknown_rules_are_refused(part, rules, ignore_merges, words):
    tokenizer = make_tokenizer().backend_tokenizer
    setattr(tokenizer, part, rules)
    values = json.loads(tokenizer.to_str())
    values["model"]["ignore_merges"] = ignore_merges
    with pytest.raises(ExportError, match=words):
        GgufTokenizer(with_bos(Tokenizer.from_str(json.dumps(values))), 320, "llama")


def test_the_bundled_models_tokenizer_is_known():
    assert GgufTokenizer(AutoTokenizer.from_pretrained(Path(BUNDLED_FOLDER)), 8192, "llama")._pre == "llama-bpe"
