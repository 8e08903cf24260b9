"""Makes the tokenizer that a GGUF file describes, which gives llama.cpp's tokens.

Files have the vocabulary, merges or scores, and the name of a pre-tokenizer, whose rules are in llama.cpp's code. The
rules of byte-level vocabularies are below; a name that is not known there is refused, since another rule would read
texts differently without a sign. llama.cpp normalises no text, and neither does this.
"""

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
# In characters, far above known models. Joins of tokens take time with the square of their lengths.
_LONGEST, _MAX_CHARACTERS = 1024, 2**23

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = [rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"]
_STARCODER = [r"\p{N}", *_GPT2]
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]


def _llama3(digits: str) -> list[str]:
    return [
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ]


def _cased(digits: str, ending: str) -> list[str]:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return [
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ]


_LLAMA3, _QWEN2 = _llama3(r"\p{N}{1,3}"), _llama3(r"\p{N}")
# Qwen3.5 has marks in words.
_QWEN35 = [_QWEN2[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")]
_GPT4O, _TEKKEN = _cased(r"\p{N}{1,3}", f"(?i:{_CONTRACTIONS})?"), _cased(r"\p{N}", "")
# Texts are split by one rule after the other.
PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder"), _STARCODER),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
}
# With these, a word that is a token stays whole, whatever its merges are, and texts begin with BOS unless the file says
# otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer of a file, with BOS and EOS added as llama.cpp does."""
    tokens, kind = file.get("tokenizer.ggml.tokens", list, []), file.get("tokenizer.ggml.model", str, "")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{file.name!r} has no tokenizer; download the model again, or another file of it.")
    if max(map(len, tokens)) > _LONGEST or sum(map(len, tokens)) > _MAX_CHARACTERS:
        raise ModelError(
            f"{file.name!r} has tokens that are too long; expected {_LONGEST} characters each at most, and "
            f"{_MAX_CHARACTERS} in all."
        )
    types = file.get("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise ModelError(f"{file.name!r} has {len(tokens)} tokens, but types of {len(types)}; download it again.")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif kind in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentencepiece(file, tokens, types, is_gemma4=kind == "gemma4"), True
    else:
        raise ModelError(
            f"{file.name!r} has a tokenizer of the kind {kind[:20]!r}; expected 'gpt2', 'llama' or 'gemma4'."
        )
    _add_special_tokens(file, tokenizer, tokens, types)
    _add_template(file, tokenizer, tokens, adds_bos=adds_bos)
    return tokenizer


def special_tokens_of(file: GgufFile) -> dict[str, str]:
    """Returns the tokens with a role, in transformers' words: "bos_token", "eos_token", "unk_token", "pad_token"."""
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: _token(file, tokens, role) for name, role in roles.items()}
    return {name: token for name, token in found.items() if token is not None}


def _token(file: GgufFile, tokens: list[str], role: str) -> str | None:
    number = file.token_id(role)
    return None if number is None else tokens[number]


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer of bytes, and whether it adds BOS unless the file says otherwise."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.name!r} splits texts by the rules {name[:40]!r}, which are not known; expected "
            f"{', '.join(PRE_TOKENIZERS)}."
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, _merges(file, vocabulary), ignore_merges=name in WHOLE_WORDS))
    rules = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*rules, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in WHOLE_WORDS


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = file.get("tokenizer.ggml.merges", list, [])
    pairs = [tuple(merge.split(" ", 1)) for merge in merges if isinstance(merge, str) and " " in merge]
    if len(pairs) < len(merges):
        raise ModelError(f"{file.name!r} has damaged merges in its tokenizer; download it again.")
    # llama.cpp ignores merges whose result is not a token.
    return [pair for pair in pairs if {*pair, "".join(pair)} <= vocabulary.keys()]


def _by_scores(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns merges in the order of scores: llama.cpp joins the two neighbours whose result has the highest one."""
    scores = file.get("tokenizer.ggml.scores", list, [])
    if len(scores) != len(tokens):
        raise ModelError(f"{file.name!r} has {len(tokens)} tokens, but {len(scores)} scores; download it again.")
    best_first = sorted(range(len(tokens)), key=lambda number: (-scores[number], number))
    return [pair for number in best_first for pair in _halves(tokens[number], vocabulary)]


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int], *, is_gemma4: bool) -> Tokenizer:
    """Returns a tokenizer of characters, with bytes for unknown ones; Gemma 4's is split at line breaks."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(file, vocabulary) if is_gemma4 else _by_scores(file, tokens, vocabulary)
    unknown = _token(file, tokens, "unknown") or next(iter(_of_type(tokens, types, _UNKNOWN)), None)
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    begins_with_space = not is_gemma4 and file.get("tokenizer.ggml.add_space_prefix", bool, True)
    if is_gemma4:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        # llama.cpp keeps line breaks whole that are a token, whatever the merges are.
        breaks = [token for token in _of_type(tokens, types, _NORMAL) if not token.strip("\n")]
        if any(len(tokenizer.encode(each).ids) > 1 for each in breaks):
            raise ModelError(f"{file.name!r} has merges that part line breaks of one token; download it again.")
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if begins_with_space else replace
    )
    strip = [decoders.Strip(" ", left=1)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _halves(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of tokens that a token can be joined of."""
    for cut in range(1, len(token)):
        left, right = token[:cut], token[cut:]
        if left in vocabulary and right in vocabulary:
            yield left, right


def _of_type(tokens: list[str], types: list[int], *wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=False) if kind in wanted and token]


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Makes the tokenizer find control tokens, and those that the model's makers have added, before all others."""
    # As in llama.cpp, Phi-3's control tokens swallow the white space behind them.
    strips = file.architecture == "phi3" and file.get("tokenizer.ggml.model", str) == "llama"
    kept = ("<unk>", "<s>", "<|endoftext|>")
    special = _of_type(tokens, types, _CONTROL, _UNKNOWN)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=strips and token not in kept) for token in special]
    )
    own = _of_type(tokens, types, _USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _add_template(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], *, adds_bos: bool) -> None:
    adds = {"bos": adds_bos, "eos": False}
    adds = {role: file.get(f"tokenizer.ggml.add_{role}_token", bool, default) for role, default in adds.items()}
    if file.get("tokenizer.ggml.model", str) == "gemma4":
        adds["bos"] = True  # as in llama.cpp, whatever the file says
    found: dict[str, Any] = {role: _token(file, tokens, role) for role in adds if adds[role]}
    found = {role: token for role, token in found.items() if token is not None}
    if not found:
        return
    template = [found.get("bos"), "$A", found.get("eos")]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.TemplateProcessing(
                single=[part for part in template if part is not None],
                special_tokens=[(token, tokenizer.token_to_id(token)) for token in found.values()],
            )
        ]
    )
