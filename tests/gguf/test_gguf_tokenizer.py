"""Tokenizers from GGUF files give llama.cpp's tokens."""

import json
from pathlib import Path

import pytest
from builders import make_llama, make_tokenizer
from gguf_files import write_gguf
from llama_cpp import ask_each
from small_tokenizer import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_of
from sebp_edge.engine.models.gguf_base import read_gguf_tokenizer
from sebp_edge.errors import ModelError

NOTES = [path.read_text("utf-8") for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.md"))]
HARD = [
    "",
    " ",
    "  two\n\n\n three\t\r\n   ",
    "I'll WE'VE can't 1234567 3.14 1,000 2026-11-23",
    "naïve café 日本語 Ωmega ß é 👍🏽 \u200b",
    "<|user|>hello<|end|> <|bos|>x <|unknown|>",
    "a--b__c==$^~|<>+`!?...",
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A tokenizer trained on the example notes, which has long words, digits and signs."""
    tokenizer = make_tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|end|>"], show_progress=False,
        initial_alphabet=sorted(tokenizer.get_vocab().keys() & {chr(code) for code in range(33, 400)}),
    )  # fmt: skip
    tokenizer.train_from_iterator([*NOTES, *HARD], trainer)
    return wrapped(tokenizer)


def wrapped(tokenizer):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write(path, vocabulary, **options):
    return write_gguf(path, make_llama(vocab_size=2000, num_hidden_layers=1), vocabulary, **options)


def tokenizers_that_agree(paths):
    """The tokenizers of files, whose tokens of all texts are llama.cpp's."""
    texts = ["\n\n".join(NOTES), *HARD]
    for path, (found, _) in zip(paths, ask_each(paths, texts=texts), strict=True):
        with GgufFile(path) as file:
            tokenizer = tokenizer_of(file)
        different = [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids]
        assert not different, (path.stem, len(different), repr(different[0][:200]))
        yield tokenizer


@pytest.mark.slow
def test_each_pre_tokenizer_gives_llama_cpps_tokens(vocabulary, tmp_path):
    pytest.importorskip("xllamacpp")
    paths = [write(tmp_path / f"{pre}.gguf", vocabulary, pre=pre) for pre in PRE_TOKENIZERS]
    for tokenizer in tokenizers_that_agree(paths):
        assert tokenizer.decode(tokenizer.encode(HARD[4]).ids) == HARD[4]


def characters():
    """A tokenizer of characters trained on the example notes, and the type of each token in a file."""
    saved = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    saved.normalizer = normalizers.Replace(" ", "▁")
    saved.decoder = decoders.ByteFallback()
    special = ["<unk>", "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|end|>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1900, special_tokens=special + octets, show_progress=False)
    breaks = 99 * ["\n", "\n\n", "\n\n\n"]
    saved.train_from_iterator(["▁" + word for text in NOTES for word in text.split()] + breaks, trainer)
    size = saved.get_vocab_size()
    return saved, [2] + [3] * 5 + [6] * 256 + [1] * (size - 262) + [5] * (2000 - size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        {"tokenizer__ggml__model": "llama", "tokenizer__ggml__add_space_prefix": True},
        {"tokenizer__ggml__model": "llama", "tokenizer__ggml__add_space_prefix": False},
        # llama.cpp ignores that no BOS is added.
        {"tokenizer__ggml__model": "gemma4", "tokenizer__ggml__add_bos_token": False},
    ],
    ids=str,
)
def test_a_vocabulary_of_characters_gives_llama_cpps_tokens(rules, tmp_path):
    pytest.importorskip("xllamacpp")
    saved, kinds = characters()
    path = write(
        tmp_path / "model.gguf",
        wrapped(saved),
        tokenizer__ggml__scores=[-float(max(0, number - 262)) for number in range(2000)],
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__unknown_token_id=0,
        **rules,
    )
    (tokenizer,) = tokenizers_that_agree([path])
    ids = tokenizer.encode("the old map 日本", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "the old map 日本"


def test_merges_that_part_line_breaks_of_one_token_are_refused(tmp_path):
    """llama.cpp keeps such line breaks whole."""
    saved, kinds = characters()
    merges = [" ".join(pair) for pair in json.loads(saved.to_str())["model"]["merges"] if "\n" not in "".join(pair)]
    path = write(
        tmp_path / "model.gguf",
        wrapped(saved),
        tokenizer__ggml__model="gemma4",
        tokenizer__ggml__merges=merges,
        tokenizer__ggml__token_type=kinds,
    )
    with pytest.raises(ModelError, match="merges that part line breaks of one token"):
        read_gguf_tokenizer(resolve(path))


def test_special_tokens_and_chat_template_come_from_the_file(vocabulary, tmp_path):
    path = write(tmp_path / "model.gguf", vocabulary)
    tokenizer = read_gguf_tokenizer(resolve(path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("the").input_ids[0] == tokenizer.bos_token_id
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the ferry"}], tokenize=False)
    assert chat == "<|bos|><|user|>the ferry<|end|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "superbpe"}, "splits texts by the rules 'superbpe'"),
        ({"tokenizer__ggml__model": "bert"}, "a tokenizer of the kind 'bert'"),
        ({"tokenizer__ggml__model": "llama"}, "2000 tokens, but 0 scores"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, "2 tokens, but types of 2000"),
        ({"tokenizer__ggml__bos_token_id": 2000}, "has the bos token 2000, but only 2000 tokens"),
        ({"tokenizer__ggml__merges": ["ab"]}, "damaged merges"),
        ({"tokenizer__ggml__tokens": "none"}, "of type str; expected list"),
    ],
)
def test_tokenizers_that_cannot_be_made_are_refused(changes, message, vocabulary, tmp_path):
    path = write(tmp_path / "model.gguf", vocabulary, **changes)
    with pytest.raises(ModelError, match=message):
        read_gguf_tokenizer(resolve(path))


def test_every_note_is_decoded_to_itself(vocabulary, tmp_path):
    tokenizer = read_gguf_tokenizer(resolve(write(tmp_path / "model.gguf", vocabulary, pre="llama-bpe")))
    for note in NOTES:
        assert tokenizer.decode(tokenizer(note, add_special_tokens=False).input_ids) == note
