"""Documents and their contents: a plain text, a prompt with its completion, or a conversation."""

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple


class Completion(NamedTuple):
    """A prompt and its completion; only the completion has loss."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Chat messages, each with "role" and "content"; only the assistant's have loss."""

    messages: tuple[dict[str, str], ...]


Content = str | Completion | Conversation


@dataclass(frozen=True, slots=True)
class Document:
    """One source text.

    Attributes:
        source: the name of its origin, for the report.
        content: a plain text, a prompt with its completion, or a conversation.
        name: the source, if that is a name by which its owner knows the document; None if it is a number only.
    """

    source: str
    content: Content
    name: str | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not used, and why."""

    source: str
    reason: str

    @property
    def kind(self) -> str:
        """The reason without the name of another document and without a count."""
        if self.reason.startswith("the same as "):
            return "the same as another one"
        return re.sub(r": [\d,]+\Z", "", self.reason)


class Unreadable(Exception):
    """One file, record or document cannot be used. Callers catch it and report the reason."""


@dataclass(frozen=True, slots=True)
class NotRead:
    """Says what of a file that is used was not read. It stands among the file's contents."""

    reason: str


def own_text(content: Content) -> str:
    """Returns the text that tells a document from others; many conversations share their system messages."""
    if isinstance(content, Conversation):
        return "\n".join(message["content"] for message in content.messages if message["role"] != "system")
    return "\n".join(texts_of(content))


def texts_of(content: Content) -> list[str]:
    """Returns the texts of a content: the text, prompt and completion, or the messages' contents."""
    if isinstance(content, Conversation):
        return [message["content"] for message in content.messages]
    return [content] if isinstance(content, str) else list(content)


def content_hash(content: Content, salt: bytes) -> str:
    """Returns a salted hash of a content and its kind, of 128 bits, as hexadecimal digits."""
    return blake2b(json.dumps(content).encode(), digest_size=16, key=salt).hexdigest()


def num_bytes(content: Content) -> int:
    """Returns the size of a content in UTF-8, in bytes."""
    return sum(len(text.encode(errors="surrogatepass")) for text in texts_of(content))


# Control characters, line separators, marks of text direction, and surrogates.
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: str) -> str:
    """Replaces each character of a file's name that cannot be printed, or could control a terminal, with "?"."""
    return _NOT_PRINTABLE.sub("?", name)


def clean_content(content: Content | Unreadable) -> Content:
    """Converts newlines to Unix style, and strips a plain text.

    Raises:
        Unreadable: it has no text to train on, it is not valid Unicode, or `content` is an Unreadable itself.
    """
    if isinstance(content, Unreadable):
        raise content
    if isinstance(content, str):
        content = trainable_text = _clean_text(content).strip()
    elif isinstance(content, Completion):
        content = Completion(*map(_clean_text, content))
        trainable_text = content.completion.strip()
    else:
        messages = tuple({key: _clean_text(value) for key, value in message.items()} for message in content.messages)
        content = Conversation(messages)
        trainable_text = any(message["content"].strip() for message in messages if message["role"] == "assistant")
    if not trainable_text:
        raise Unreadable("empty")
    return content


def as_chat(content: Content, *, chat_template: bool) -> Content:
    """Returns the content; with `chat_template`, turns a prompt and its completion into a conversation."""
    if not (isinstance(content, Completion) and chat_template):
        return content
    roles = ("user", "assistant")
    return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, content, strict=True)))


_SURROGATE = re.compile("[\ud800-\udfff]")


def _clean_text(text: str) -> str:
    if _SURROGATE.search(text):
        raise Unreadable("not valid Unicode (a lone surrogate)")
    return unix_newlines(text)


def unix_newlines(text: str) -> str:
    """Converts line endings to Unix style."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
