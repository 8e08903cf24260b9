"""Documents and their contents: a plain text, a prompt with its completion, or a conversation."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from sebp_edge.errors import TextsError


class PromptCompletion(NamedTuple):
    """A prompt and its completion; only the completion has loss."""

    prompt: str
    completion: str


# A chat message: the strings "role" and "content". An assistant's may have "tool_calls", "reasoning_content", and the
# "weight" 0 if it has no loss, a tool's "tool_call_id", and anyone's a "name". One of a chat between people may have an
# "author", whom chat templates are not told.
Message = dict[str, Any]


class Conversation(NamedTuple):
    """Chat messages, of which only the assistant's have loss, and the tools that the assistant may call."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def turns(self) -> list[int]:
        """The indices of the messages with loss."""
        return turns_with_loss(self.messages)


def turns_with_loss(messages: Sequence[Message]) -> list[int]:
    """Returns the indices of the assistant's messages, without those of weight 0."""
    return [
        turn
        for turn, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1) != 0
    ]


Content = str | PromptCompletion | Conversation


_COUNT = re.compile(r": ([\d,]*\d(?: of [\d,]+)?)\Z| \((?:byte|line) [\d,]+\)")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not used, and why."""

    source: str
    reason: str

    @property
    def kind(self) -> str:
        """The reason without the name of another document, without counts and without a place in the file."""
        if self.reason.startswith("the same as "):
            return "the same as another one"
        return _COUNT.sub("", self.reason)

    @property
    def count(self) -> str:
        """How much of a file this is about, such as "37 of 120" words; empty if that is all of it."""
        found = _COUNT.search(self.reason)
        return (found and found[1]) or ""

    @property
    def number(self) -> int:
        """The count; 0 without one."""
        return int((self.count or "0").split()[0].replace(",", ""))


class Unreadable(Exception):
    """One file, record or document cannot be used. Callers catch it and report the reason.

    Attributes:
        reason: why, without the line.
        line: the line of the file that is faulty, if it is known.
    """

    def __init__(self, reason: str, line: int | None = None):
        super().__init__(reason if line is None else f"{reason} (line {line})")
        self.reason, self.line = reason, line


@dataclass(frozen=True, slots=True)
class NotRead:
    """Says what of a file that is used was not read. It stands among the file's contents.

    Attributes:
        reason: what is missing; "" if that goes without saying.
        front_matter: of a note, which is searched, but not learnt.
    """

    reason: str
    front_matter: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """One source text.

    Attributes:
        source: the name of its origin, for the report.
        content: a plain text, a prompt with its completion, or a conversation.
        name: the source, if that is a name by which its owner knows the document; None if it is a number only.
        front_matter: of a note, with its marks, which is searched, but not learnt.
        path: of the file that it was read from; None for texts, archives and chats.
    """

    source: str
    content: Content
    name: str | None = None
    front_matter: str = ""
    path: str | None = None

    @property
    def own_text(self) -> str:
        """The text that tells it from others; many conversations share their system messages."""
        if isinstance(self.content, Conversation):
            messages = (message for message in self.content.messages if message["role"] != "system")
            return "\n".join(text for message in messages for text in _words(message))
        return "\n".join(texts_of(self.content))

    @property
    def num_characters(self) -> int:
        return sum(map(len, texts_of(self.content)))

    def hash(self, salt: bytes) -> str:
        """Returns a salted hash of its content and the content's kind, of 128 bits, as hexadecimal digits."""
        return blake2b(as_json(self.content).encode(), digest_size=16, key=salt).hexdigest()

    def as_chat(self, *, chat_template: bool) -> Content:
        """Returns the content; with `chat_template`, turns a prompt and its completion into a conversation."""
        if not (isinstance(self.content, PromptCompletion) and chat_template):
            return self.content
        roles = ("user", "assistant")
        return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, self.content, strict=True)))


def texts_of(content: Content) -> list[str]:
    """Returns the texts of a content: the text, prompt and completion, or what the messages and tools hold."""
    if isinstance(content, Conversation):
        tools = [json.dumps(content.tools, ensure_ascii=False)] if content.tools else []
        return [*tools, *(text for message in content.messages for text in _words(message))]
    return [content] if isinstance(content, str) else list(content)


def _words(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    before = [message["reasoning_content"]] if "reasoning_content" in message else []
    return [*before, message["content"], *([json.dumps(calls, ensure_ascii=False)] if calls else [])]


def as_json(content: Content) -> str:
    """Returns a content as JSON; two contents of one kind are equal if this is."""
    if isinstance(content, Conversation) and not content.tools:
        content = content[:1]  # saved hashes are of this form
    return json.dumps(content)


def num_bytes(content: Content) -> int:
    """Returns the size of a content in UTF-8, in bytes."""
    return sum(len(piece.encode(errors="surrogatepass")) for text in texts_of(content) for piece in pieces(text))


# The least characters of a piece of a text, which limits the memory.
PIECE = 250_000
_BLANK = re.compile(r"[ \n。]")


def pieces(text: str, least: int = PIECE) -> Iterator[str]:
    """Cuts a text after blanks and full stops, which are in no word and in no character of several code points."""
    begin = 0
    while begin < len(text):
        blank = _BLANK.search(text, begin + least)
        end = blank.end() if blank else len(text)
        yield text[begin:end]
        begin = end


_BLANK_LINES, _BLANKS = re.compile(r"(?:\s*\n)?"), re.compile(r"\s*")
# Control characters, line separators, marks of text direction, and surrogates.
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Replaces each character that cannot be printed, or could control a terminal, with "?".

    Names of files and what others wrote may have such characters.
    """
    return _NOT_PRINTABLE.sub("?", text)


def printable_lines(text: str) -> str:
    """Returns a text as it may be shown on a terminal: `printable`, with its tabs and ends of lines."""
    return _NOT_PRINTABLE.sub(lambda found: found[0] if found[0] in "\t\n" else "?", text)


def clean_content(content: Content) -> Content:
    """Converts newlines to Unix style; strips a plain text, but not the indent of its first line if it has several.

    Raises:
        Unreadable: it has no text to train on, or it is not valid Unicode.
    """
    if isinstance(content, str):
        content = _clean_text(content)
        end = len(content.rstrip())
        beginning = _BLANK_LINES if content.find("\n", 0, end) >= 0 else _BLANKS
        content = trainable_text = content[beginning.match(content, 0, end).end() : end]
    elif isinstance(content, PromptCompletion):
        content = PromptCompletion(*map(_clean_text, content))
        trainable_text = content.completion.strip()
    else:
        content = Conversation(*map(_clean, content))
        learnt = [content.messages[turn] for turn in content.turns]
        trainable_text = any(text.strip() for message in learnt for text in _words(message))
    if not trainable_text:
        raise Unreadable("empty")
    return content


def _clean(value):
    """Cleans every text in a value of JSON."""
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    return type(value)(map(_clean, value)) if isinstance(value, list | tuple) else value


_SURROGATE = re.compile("[\ud800-\udfff]")


def _clean_text(text: str) -> str:
    if _SURROGATE.search(text):
        raise Unreadable("not valid Unicode (a lone surrogate)")
    return unix_newlines(text)


def unix_newlines(text: str) -> str:
    """Converts line endings to Unix style."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(text: str, name: str) -> None:
    """Raises a TextsError for what is no text, or no valid Unicode, without quoting it."""
    if not isinstance(text, str):
        raise TextsError(f"{name} must be a text, but is of type {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextsError(f"{name} is not valid Unicode (character {error.start}); give it in UTF-8.") from None
