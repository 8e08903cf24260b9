"""Reads Claude's `conversations.json`. The owner's words are the human's; the replies are context."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.values.chats import OWNER, Chat, ChatMessage
from sebp_edge.values.documents import Unreadable

_AUTHORS = {"human": OWNER, "assistant": "Claude"}


def read_claude(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the conversations, and a fault that ended the reading."""
    for value in reduced_values(text, _reduced):
        is_known = isinstance(value, Chat | Unreadable)
        yield value if is_known else Unreadable("a conversation of Claude of an unknown version")


def _reduced(value: dict[str, Any]) -> Any:
    if isinstance(value.get("chat_messages"), list):
        left_out = Counter(each for each in value["chat_messages"] if isinstance(each, str))
        messages = [each for each in value["chat_messages"] if isinstance(each, ChatMessage)]
        return Chat("Claude", str(value.get("uuid", ""))[:8], messages, owner=OWNER, left_out=left_out)
    return _message(value) if "sender" in value else value


def _message(value: dict[str, Any]) -> ChatMessage | str:
    """Returns a message, or the kind of one that is left out."""
    parts, said = value.get("content"), value.get("text")
    if isinstance(parts, list) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        said = "\n".join(text for text in texts if isinstance(text, str))
    author = _AUTHORS.get(value["sender"]) if isinstance(value["sender"], str) else None
    if author is None or not isinstance(said, str):
        return "messages of an unknown form"
    if not said.strip():
        return "messages without words"
    return ChatMessage(author, day_of(value.get("created_at")), said.strip())
