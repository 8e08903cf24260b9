"""A model's tokenizer without transformers: the same tokens from the same Rust code, without a second of imports."""

from dataclasses import dataclass

from tokenizers import AddedToken, Encoding, Tokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    """What is known of a tokenizer besides what its Rust code has."""

    tokens: dict[str, int]  # ids of the tokens "bos", "eos", "pad" and "unk"; those that it lacks are missing
    special: dict  # `special_tokens_map`: texts, and lists of them
    added: dict[str, int]  # ids of added tokens, as texts, and whether each is special, by content
    added_special: tuple[str, ...]
    templates: dict[str, str]  # its chat templates by name; "default" is the usual one

    @classmethod
    def of(cls, tokenizer) -> "TokenizerFacts":
        """Returns what is known of a fast tokenizer of transformers."""
        tokens = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
        texts = tokenizer.special_tokens_map.items()
        added, templates = tokenizer.added_tokens_decoder, tokenizer.chat_template or {}
        return cls(
            tokens={name: token for name, token in tokens.items() if token is not None},
            special={name: [*map(str, one)] if isinstance(one, list) else str(one) for name, one in texts},
            added={token.content: number for number, token in added.items()},
            added_special=tuple(token.content for token in added.values() if token.special),
            templates={"default": templates} if isinstance(templates, str) else templates,
        )


class KnownEncoding:
    """An encoded text, as transformers returns it."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding

    def __getitem__(self, name: str) -> list:
        return {"input_ids": self._encoding.ids, "offset_mapping": self._encoding.offsets}[name]

    def word_ids(self) -> list[int | None]:
        """Returns the word of each token."""
        return self._encoding.word_ids


class KnownTokenizer:
    """A tokenizer with what texts need of one of transformers."""

    is_fast = True

    def __init__(self, facts: TokenizerFacts, rust: Tokenizer):
        rust.no_truncation()
        rust.no_padding()
        self._rust, self._templates = rust, facts.templates
        self.special_tokens_map = facts.special
        self.chat_template = facts.templates or None
        self.bos_token_id, self.eos_token_id = facts.tokens.get("bos"), facts.tokens.get("eos")
        self.pad_token_id, self.unk_token_id = facts.tokens.get("pad"), facts.tokens.get("unk")
        special = set(facts.added_special)
        self.added_tokens_decoder = {
            number: AddedToken(content, special=content in special) for content, number in facts.added.items()
        }

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, split_special_tokens: bool = False, **returned
    ) -> KnownEncoding | dict:
        self._rust.encode_special_tokens = split_special_tokens
        if isinstance(text, str):
            return KnownEncoding(self._rust.encode(text, add_special_tokens=add_special_tokens))
        found = self._rust.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in found]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        """Returns the text of tokens."""
        return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_chat_template(self, tools: list | None = None) -> str:
        """Returns the chat template for conversations with or without tools."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError("there is no chat template")
        return self._templates[name]
