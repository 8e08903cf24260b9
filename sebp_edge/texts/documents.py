"""What was read: documents, each with a plain text, a prompt with its completion, or a conversation."""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Completion(NamedTuple):
    """A prompt, and the completion to be learnt."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Chat messages, each with "role" and "content"; the assistant's are learnt."""

    messages: tuple[dict[str, str], ...]


Content = str | Completion | Conversation


@dataclass(frozen=True, slots=True)
class Document:
    """One source text.

    Attributes:
        source: where it came from, for the report on screen; it is never saved.
        content: a plain text, a prompt with its completion, or a conversation.
    """

    source: str
    content: Content


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not used, and why."""

    source: str
    reason: str


class Unreadable(Exception):
    """Why one file, record or document cannot be used; caught by who reads many of them, and reported."""


def num_bytes(content: Content) -> int:
    """The size of a content in UTF-8."""
    if isinstance(content, Conversation):
        content = [message["content"] for message in content.messages]
    texts = [content] if isinstance(content, str) else content
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


# Control characters, line separators, and marks that turn the direction of writing.
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: str) -> str:
    """A file's name with a question mark for each character that could not be shown, or would steer a terminal."""
    return _NOT_SHOWN.sub("?", name)


def record_content(record) -> Content:
    """One record's content.

    Raises:
        Unreadable: it is neither `{"text"}`, `{"prompt", "completion"}` nor `{"messages"}`, or a value is no string.
    """
    if not isinstance(record, dict):
        raise Unreadable("neither a text nor a record")
    if "messages" in record:
        return Conversation(_messages(record["messages"]))
    if "prompt" in record and "completion" in record:
        return Completion(*(_string(record[key], key) for key in ("prompt", "completion")))
    if "text" in record:
        return _string(record["text"], "text")
    raise Unreadable('no "text", "prompt" and "completion", or "messages"')


def _string(value, key: str) -> str:
    if not isinstance(value, str):
        raise Unreadable(f'"{key}" is not a string')
    return value


def _messages(messages) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unreadable('"messages" is not a list of messages')
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise Unreadable('a message without "role" and "content" strings')
    if not any(message["role"] == "assistant" for message in messages):
        raise Unreadable("no message of the assistant to learn from")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def clean_content(content: Content | Unreadable) -> Content:
    """Unix newlines; a plain text loses blank space around it.

    Raises:
        Unreadable: there is nothing to learn in it, it is no Unicode text, or it was Unreadable already.
    """
    if isinstance(content, Unreadable):
        raise content
    if isinstance(content, str):
        content = learnt = _sound(content).strip()
    elif isinstance(content, Completion):
        content = Completion(*map(_sound, content))
        learnt = content.completion.strip()
    else:
        messages = tuple({key: _sound(value) for key, value in message.items()} for message in content.messages)
        content = Conversation(messages)
        learnt = any(message["content"].strip() for message in messages if message["role"] == "assistant")
    if not learnt:
        raise Unreadable("empty")
    return content


def as_learnt(content: Content, *, chat_template: bool) -> Content:
    """What a document is learnt as: a conversation, through the chat template, or what it is."""
    if not (isinstance(content, Completion) and chat_template):
        return content
    roles = ("user", "assistant")
    return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, content, strict=True)))


_SURROGATE = re.compile("[\ud800-\udfff]")


def _sound(text: str) -> str:
    if _SURROGATE.search(text):
        raise Unreadable("half a character (a lone surrogate), which is no Unicode text")
    return unix_newlines(text)


def unix_newlines(text: str) -> str:
    """The text with its lines ended as on Unix."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
