"""Knows the bytes of a tokenizer's tokens: which tokens begin with some bytes, and which go on with a word."""

import bisect
import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sebp_edge.basics.scripts import UNSPACED
from sebp_edge.errors import ModelError

# Apostrophes are within words, as in "don't".
_IN_WORD = re.compile(rf"[^\W{UNSPACED}]|['’]")
# Characters that change the one before: of marks, joiners between emojis and skin tones.
_JOINS = re.compile("[\u200d\U0001f3fb-\U0001f3ff]")
_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Vocabulary:
    """The bytes of each token of a fast tokenizer, byte-level or SentencePiece's."""

    def __init__(self, tokenizer, size: int):
        self._bytes: list[bytes | None] = [None] * size
        for token, found in _bytes_of(tokenizer).items():
            if token < size and found:
                self._bytes[token] = found
        known = [token for token in range(size) if self._bytes[token] is not None]
        self._order = sorted(known, key=self._bytes.__getitem__)
        self._sorted = [self._bytes[token] for token in self._order]
        going_on = [_going_on(found[: _size(found)] if found else b"") for found in self._bytes]
        self._joins, self._within = map(torch.tensor, zip(*going_on, strict=True))

    def __getitem__(self, token: int) -> bytes | None:
        """The bytes of a token; None if it is a control token, or unknown to the tokenizer."""
        return self._bytes[token]

    def joined(self, tokens: Sequence[int]) -> bytes | None:
        """The bytes of a sequence of tokens; None if one of them has none."""
        found = [self._bytes[token] for token in tokens]
        return None if None in found else b"".join(found)

    def beginning_with(self, prefix: bytes) -> list[int]:
        """The tokens whose bytes begin with `prefix`, which is not empty."""
        begin = bisect.bisect_left(self._sorted, prefix)
        end = bisect.bisect_left(self._sorted, True, lo=begin, key=lambda found: not found.startswith(prefix))
        return self._order[begin:end]

    def beginnings(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens in the order of their bytes, int64 [known], and where in it those are that begin alike.

        For each token and its first 1 to `most` bytes: where the tokens with these begin, and how many they are, int32
        [vocabulary, most]; none if it has fewer bytes.
        """
        first = np.array(self._sorted, dtype=f"S{most}").view(np.uint8).reshape(-1, most)
        sizes, places = np.array([len(found) for found in self._sorted]), np.arange(len(first))
        begins, counts = (np.zeros((len(self._bytes), most), dtype=np.int32) for _ in range(2))
        is_new = places == 0
        for at in range(most):
            is_long = sizes > at
            is_new[1:] |= (first[1:, at] != first[:-1, at]) | (is_long[1:] != is_long[:-1])
            begin = np.maximum.accumulate(np.where(is_new, places, 0))
            begins[self._order, at] = begin * is_long
            counts[self._order, at] = np.bincount(begin, minlength=len(first))[begin] * is_long
        return torch.tensor(self._order), torch.from_numpy(begins), torch.from_numpy(counts)

    def going_on_after(self, character: str) -> Tensor:
        """Weights of the tokens, fp32 [vocabulary]: 1 if one goes on with the word that ends in `character`, else 0.

        So does a token that begins with a part of a character, if one that has the part does. In scripts without spaces
        each character is a word.
        """
        return self._within if _is_within_word(character) else self._joins


def goes_on(before: str, after: str) -> bool:
    """Whether two characters are within one word, or parts of one sign."""
    return _is_within_word(after) if _is_within_word(before) else _joins(after)


def _joins(character: str) -> bool:
    return _is_mark(character) or _JOINS.match(character) is not None


def _is_within_word(character: str) -> bool:
    return _IN_WORD.match(character) is not None or _is_mark(character)


def _is_mark(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character)[0] == "M"


def _size(text: bytes) -> int:
    """Returns how many bytes the first character has."""
    return 1 if text[0] < 0xC0 else 2 if text[0] < 0xE0 else 3 if text[0] < 0xF0 else 4


@functools.cache
def _going_on(first: bytes) -> tuple[float, float]:
    """Whether a character of these bytes, or one that begins with them, joins the one before, or is within a word."""
    characters = "".join(_characters(first))
    has_mark = any(map(_is_mark, characters))
    return tuple(float(has_mark or pattern.search(characters) is not None) for pattern in (_JOINS, _IN_WORD))


def _characters(first: bytes) -> Iterable[str]:
    """Returns the character of these bytes, or those that begin with them.

    Bytes within a character are like a mark, and the first of four like a skin tone, since emojis are most of these.
    """
    if not first or first[0] < 0x80:
        return first.decode()
    missing = _size(first) - len(first)
    if first[0] < 0xC0 or missing == 3:
        return "\u0301" if first[0] < 0xC0 else "\U0001f3fb"
    code = first[0] & (0x7F >> _size(first))
    for byte in first[1:]:
        code = code << 6 | byte & 0x3F
    return map(chr, range(code << 6 * missing, (code + 1) << 6 * missing))


def _bytes_of(tokenizer) -> dict[int, bytes]:
    """Returns the bytes of all tokens but control tokens."""
    texts = {token: text for text, token in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).items()}
    decoder = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    kinds = {each["type"]: each for each in decoder.get("decoders", [decoder])}
    spaces = (kinds.get("Metaspace", {}).get("replacement"), kinds.get("Replace", {}).get("pattern", {}).get("String"))
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        found = {token: bytes(map(byte_of.get, text)) for token, text in texts.items() if byte_of.keys() >= {*text}}
    elif _SPACE in spaces:
        found = {token: _sentencepiece_bytes(text) for token, text in texts.items()}
    else:
        raise ModelError(f"The bytes of this tokenizer's tokens are not known; its decoder is {decoder['type']}.")
    unknown = tokenizer.unk_token_id
    for token, added in tokenizer.added_tokens_decoder.items():
        found[token] = b"" if added.special else added.content.encode()
    return {token: each for token, each in found.items() if token != unknown}


def _sentencepiece_bytes(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
