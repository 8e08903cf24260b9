"""Tokenising a text in windows gives the same tokens as at once, with every kind of tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.lessons import tokens
from sebp_edge.lessons.tokens import tokenise

NOTES = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[2].glob("examples/notes/*/*.md"))]
# Runs without a word boundary, characters of several tokens, combining marks, and strings that tokenizers treat apart.
ODD = [
    "👩‍👩‍👧‍👦🇩🇪🇫🇷" * 60,
    "日記。今日は雨が降った。明日も。" * 40,
    "e\u0301" * 200,
    "שלום עולם नमस्ते दुनिया " * 50,
    "1234567890" * 120,
    "a" * 800,
    " " * 500 + "x",
    "\n\n\n" * 200 + "y",
    "don't won't " * 80,
    "http://a.b/c?d=e&f=" + "Qx9" * 200,
    "\t\tif x:\n" * 100,
    "<|eos|><s></s>" * 40,
    "Ａｂｃ ﬁ ½ \u200d\ufeff\x00" * 80,
    "".join(chr(code) for code in range(0x20, 0x3000, 5)),
]
TEXTS = {"odd": "".join(ODD), "both": "\n".join(text for pair in zip(NOTES, ODD, strict=False) for text in pair)}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(model, trainer, normalizer, pre_tokenizer, **options) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of 4,000 tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special = ["<unk>", "<s>", "</s>", *options.pop("more", [])]
    trainer = trainer(vocab_size=4000, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator([*NOTES, *ODD], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def tokenizer_without_words() -> PreTrainedTokenizerFast:
    """Makes one like Llama 2's: a single BPE over the whole text, blanks included, with a blank put in front of it."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = pre_tokenizers.Split(Regex("(?<=[^▁])(?=▁)"), "isolated")
    model, more = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True), [f"<0x{n:02X}>" for n in range(256)]
    tokenizer = train_tokenizer(model, trainers.BpeTrainer, normalizer, words, more=more)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    return tokenizer


def tokenizer_with_words(pattern: str) -> PreTrainedTokenizerFast:
    """Makes one like Llama 3's: a byte-level BPE within the words of a pattern."""
    words = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pre_tokenizer = pre_tokenizers.Sequence(words)
    return train_tokenizer(
        models.BPE(), trainers.BpeTrainer, normalizers.NFC(), pre_tokenizer, initial_alphabet=alphabet
    )


MAKE = {
    "tiny": lambda: local_tokenizer(resolve("tiny")),
    "as Llama 2": tokenizer_without_words,
    "as Llama 3": lambda: tokenizer_with_words(LLAMA_3),
    "unigrams": lambda: train_tokenizer(
        models.Unigram(), trainers.UnigramTrainer, normalizers.NFKC(), pre_tokenizers.Metaspace(), unk_token="<unk>"
    ),
    "word pieces": lambda: train_tokenizer(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
}


@pytest.fixture(scope="module", params=MAKE)
def tokenizer(request):
    return MAKE[request.param]()


def tokenised(text, tokenizer, split_special_tokens=True):
    parts = list(tokenise(text, [(10, len(text) // 2)], tokenizer, split_special_tokens=split_special_tokens))
    return tuple([each for part in parts for each in getattr(part, name)] for name in ("ids", "starts", "loss_mask"))


@pytest.mark.parametrize(
    ("name", "split_special_tokens", "window", "overlap"),
    [("odd", True, 400, 150), ("odd", False, 1001, 200), ("both", True, 3001, 777), ("both", False, 400, 150)],
)
def test_windows_give_the_tokens_of_the_whole_text(tokenizer, name, split_special_tokens, window, overlap, set_windows):
    text = TEXTS[name]
    expected = tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False)
    set_windows(len(text), tokens.OVERLAP)
    whole = tokenised(text, tokenizer, split_special_tokens)
    assert list(whole[0]) == expected["input_ids"]
    set_windows(window, overlap)
    assert tokenised(text, tokenizer, split_special_tokens) == whole


@pytest.mark.slow
def test_if_windows_agree_one_window_at_a_time_is_tokenised(monkeypatch):
    tokenizer, lengths = local_tokenizer(resolve("tiny")), []

    def watched(text, **options):
        lengths.append(len(text))
        return tokenizer(text, **options)

    text = "\n\n".join(NOTES) * 4
    assert list(tokenise(text, [], watched, split_special_tokens=True))
    assert max(lengths) == tokens.WINDOW < len(text)
    assert len(lengths) == 1 + -(-(len(text) - tokens.WINDOW) // (tokens.WINDOW - tokens.OVERLAP))
