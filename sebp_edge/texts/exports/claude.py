"""Reads Claude's `conversations.json`. The owner's words are the human's; the replies are context."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sebp_edge.texts.chats import OWNER, Chat, ChatMessage
from sebp_edge.texts.documents import Unreadable
from sebp_edge.texts.exports.objects import day_of, reduce_objects

_AUTHORS = {"human": OWNER, "assistant": "Claude"}


def read_claude(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the conversations, and a fault that ended the reading."""
    found: list[Chat] = []

    def reduce(value: dict[str, Any]) -> Any:
        if isinstance(value.get("chat_messages"), list):
            left_out = Counter(each for each in value["chat_messages"] if isinstance(each, str))
            messages = [each for each in value["chat_messages"] if isinstance(each, ChatMessage)]
            found.append(Chat("Claude", str(value.get("uuid", ""))[:8], messages, owner=OWNER, left_out=left_out))
            return None
        return _message(value) if "sender" in value else value

    fault = reduce_objects(text, reduce)[1]
    yield from found
    if fault or not found:
        yield fault or Unreadable("a Claude export of an unknown version")


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
