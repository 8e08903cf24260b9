"""What GGUF calls a tokenizer's rules and tokens.

llama.cpp has the rules of pre-tokenizers in its code, by name. A tokenizer's rules are compared with those; unknown
ones are refused, since llama.cpp would read texts as other tokens.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping

from gguf import GGUFWriter, TokenType

from sebp_edge.engine.models.gguf.tokenizer import PRE_TOKENIZERS, WHOLE_WORDS
from sebp_edge.errors import ExportError

_SPACE, _BYTE = "▁", re.compile("<0x..>", re.DOTALL)
# The names of byte-level pre-tokenizers in llama.cpp, by their rules (see `_rules`), as files of GGUF have them and as
# transformers has them. Of several names with the same rules, the first.
_BYTE_LEVEL = {
    (*(f"split {rule}" for rule in rules), "bytes"): name for name, rules in reversed(PRE_TOKENIZERS.items())
} | {("digits", "gpt-2 words"): "smollm", ("gpt-2 words",): "gpt-2"}


class GgufTokenizer:
    """A fast transformers tokenizer in GGUF, with as many tokens as the model of `arch` has embeddings."""

    def __init__(self, tokenizer, vocabulary: int, arch: str):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._values = json.loads(tokenizer.backend_tokenizer.to_str())
        model = self._values["model"]
        if model["type"] != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
            raise _refusal(f"of the type {model['type']}")
        self._is_sentencepiece = bool(model.get("byte_fallback"))
        self._pre = None if self._is_sentencepiece else self._byte_level_name()
        self._adds_space = self._adds_space_prefix() if self._is_sentencepiece else False
        # llama.cpp has Gemma 4's merges in their order, and adds BOS to its texts.
        is_gemma4 = self._is_sentencepiece and arch == "gemma4" and not self._adds_space and adds_bos(tokenizer)
        self._kind = "gemma4" if is_gemma4 else "llama" if self._is_sentencepiece else "gpt2"
        self._tokens = list(self._all_tokens())

    def composed(self, text: str) -> str:
        """Returns a text in composed characters, if the tokenizer composes them, which llama.cpp does not."""
        return unicodedata.normalize("NFC", text) if self._values["normalizer"] == {"type": "NFC"} else text

    def add(self, writer: GGUFWriter) -> None:
        """Writes the tokenizer."""
        tokenizer = self._tokenizer
        texts, types, scores = zip(*self._tokens, strict=True)
        writer.add_tokenizer_model(self._kind)
        writer.add_tokenizer_pre(self._pre or "default")
        writer.add_token_list(list(texts))
        writer.add_token_types(list(types))
        if self._kind == "llama":
            writer.add_token_scores(list(scores))
            writer.add_add_space_prefix(self._adds_space)
        else:
            writer.add_token_merges([_merge(pair) for pair in self._values["model"]["merges"]])
        for kind in ("bos", "eos", "pad", "unk"):
            if (token := getattr(tokenizer, f"{kind}_token_id")) is not None and token < self._vocabulary:
                getattr(writer, f"add_{kind}_token_id")(token)
        # What the tokenizer does, not what its settings say.
        writer.add_add_bos_token(adds_bos(tokenizer))
        last = tokenizer("a")["input_ids"][-1]
        writer.add_add_eos_token(last == tokenizer.eos_token_id)
        if template := tokenizer.chat_template:
            writer.add_chat_template(template if isinstance(template, str) else template["default"])

    def _byte_level_name(self) -> str:
        rules = tuple(_rules(self._values["pre_tokenizer"]))
        normalizer = (self._values["normalizer"] or {}).get("type")
        name = _BYTE_LEVEL.get(rules)
        # llama.cpp normalises nothing; NFC, which Qwen has, changes only texts in decomposed characters.
        if name is None or normalizer not in (None, "NFC"):
            raise _refusal(f"with these rules: {', '.join(filter(None, [normalizer, *rules]))}")
        if self._values["model"].get("ignore_merges", False) != (name in WHOLE_WORDS):
            raise _refusal(f"with the rules {name!r} and ignore_merges {name not in WHOLE_WORDS}")
        return name

    def _adds_space_prefix(self) -> bool:
        """Whether a space is added before a text; refuses other rules than SentencePiece's."""
        normalizers = self._values["normalizer"] or {"type": "none"}
        normalizers = normalizers.get("normalizers", [normalizers])
        pre = self._values["pre_tokenizer"] or {"type": "none"}
        kinds = [each["type"] for each in normalizers]
        replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        if (
            replaces in normalizers
            and pre["type"] in ("none", "Split")
            and kinds in (["Prepend", "Replace"], ["Replace"])
        ):
            return "Prepend" in kinds
        if kinds == ["none"] and pre["type"] == "Metaspace" and pre["replacement"] == _SPACE and not pre.get("split"):
            return pre["prepend_scheme"] != "never"
        raise _refusal(f"with these rules: {', '.join([*kinds, pre['type']])}")

    def _all_tokens(self) -> Iterator[tuple[str, TokenType, float]]:
        """Yields each token's text, type and score, by id; ids without a token get one that no text has."""
        added = {token["id"]: token for token in self._values["added_tokens"]}
        texts = {number: text for text, number in self._values["model"]["vocab"].items()}
        ranks = self._ranks()
        for number in range(self._vocabulary):
            if number in added:
                text, is_special = added[number]["content"], added[number]["special"]
                if text == self._values["model"].get("unk_token"):
                    yield text, TokenType.UNKNOWN, 0.0
                elif is_special:
                    yield text, TokenType.CONTROL, -1000.0
                else:
                    yield text.replace(_SPACE, " ") if self._is_sentencepiece else text, TokenType.USER_DEFINED, -1000.0
            elif number not in texts:
                yield f"[PAD{number}]", TokenType.UNUSED, -1000.0
            elif self._is_sentencepiece and _BYTE.fullmatch(texts[number]):
                yield texts[number], TokenType.BYTE, 0.0
            else:
                yield texts[number], TokenType.NORMAL, -float(ranks.get(texts[number], len(ranks)))

    def _ranks(self) -> Mapping[str, int]:
        """Returns the order in which SentencePiece's tokens are merged, which GGUF has as their scores."""
        ranks: dict[str, int] = {}
        if self._kind != "llama":
            return ranks
        last = ""
        for pair in self._values["model"]["merges"]:
            token = _merge(pair).replace(" ", "")
            if token in ranks and token != last:
                raise _refusal("whose merges have no order of tokens")
            last = token
            ranks.setdefault(token, len(ranks))
        return ranks


def adds_bos(tokenizer) -> bool:
    """Whether a tokenizer adds its BOS token to texts."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def _merge(pair) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _rules(pre_tokenizer: Mapping | None) -> Iterator[str]:
    """Yields the rules of a byte-level pre-tokenizer, in words and regular expressions."""
    one = pre_tokenizer or {"type": "none"}
    match one["type"]:
        case "Sequence":
            for each in one["pretokenizers"]:
                yield from _rules(each)
        case "Split" if "Regex" in one["pattern"] and one["behavior"] in ("Isolated", "Removed"):
            is_plain = (one["behavior"], one["invert"]) in (("Isolated", False), ("Removed", True))
            yield f"split {one['pattern']['Regex']}" if is_plain else "split otherwise"
        case "Digits" if one["individual_digits"]:
            yield "digits"
        case "ByteLevel" if not one["add_prefix_space"]:
            yield "gpt-2 words" if one["use_regex"] else "bytes"
        case other:
            yield other


def _refusal(what: str) -> ExportError:
    return ExportError(
        f"llama.cpp has no tokenizer {what}, and would read texts as other tokens; use --format merged, or peft."
    )
