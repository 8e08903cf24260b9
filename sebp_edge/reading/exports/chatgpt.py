"""Reads ChatGPT's `conversations.json`: of each conversation the branch that was shown.

The owner's words are the user's. ChatGPT's replies are what the owner answered, so they are context.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.values.chats import OWNER, Chat, ChatMessage
from sebp_edge.values.documents import Unreadable

_AUTHORS = {"user": OWNER, "assistant": "ChatGPT"}
_WORDS = ("text", "multimodal_text")
_HIDDEN = "messages of tools and hidden messages"


def read_chatgpt(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the conversations, and what cannot be used in their place."""
    for number, value in enumerate(reduced_values(text, _reduced), start=1):
        if isinstance(value, Chat | Unreadable):
            yield replace(value, id=value.id or str(number)) if isinstance(value, Chat) else value
        else:
            yield Unreadable("a conversation of ChatGPT of an unknown version")


def _reduced(value: dict[str, Any]) -> Any:
    if isinstance(value.get("mapping"), dict):
        return _conversation(value)
    if "parent" in value and "message" in value:
        return value["parent"], value["message"]
    return _message(value) if "author" in value and "content" in value else value


def _message(value: dict[str, Any]) -> ChatMessage | str | None:
    """Returns a message, the kind of one that is left out, or None for one without words."""
    author, content, metadata = value["author"], value["content"], value.get("metadata")
    if not (isinstance(author, dict) and isinstance(content, dict)):
        return "messages of an unknown form"
    hidden = isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation")
    name = _AUTHORS.get(author.get("role"))
    if name is None or hidden or content.get("content_type") not in _WORDS or value.get("recipient", "all") != "all":
        return _HIDDEN
    parts = content.get("parts")
    if not isinstance(parts, list):
        return "messages of an unknown form"
    # What was spoken has a text, pictures have none.
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    said = "\n".join(text for text in texts if isinstance(text, str)).strip()
    if not said:
        return "attachments" if any(isinstance(part, dict) for part in parts) else None
    return ChatMessage(name, day_of(value.get("create_time")), said)


def _conversation(value: dict[str, Any]) -> Chat | Unreadable:
    nodes, at = value["mapping"], value.get("current_node")
    if at is None:
        # Without branches, the end is known.
        parents = {node[0] for node in nodes.values() if isinstance(node, tuple)}
        at = ends[0] if len(ends := [name for name in nodes if name not in parents]) == 1 else None
    shown, messages, left_out = [], [], Counter()
    while isinstance(at, str) and isinstance(node := nodes.pop(at, None), tuple):
        at, message = node
        shown.append(message)
    if not shown or at is not None:
        return Unreadable("a conversation that does not say which branch was shown")
    day = day_of(value.get("create_time"))
    for message in reversed(shown):
        if isinstance(message, ChatMessage):
            day = message.day or day
            messages.append(message._replace(day=day))
        elif isinstance(message, str):
            left_out[message] += 1
    left_out["messages of branches that were not shown"] = sum(
        isinstance(node, tuple) and isinstance(node[1], ChatMessage) for node in nodes.values()
    )
    id = value.get("conversation_id") or value.get("id")
    return Chat("ChatGPT", id[:8] if isinstance(id, str) else "", messages, owner=OWNER, left_out=left_out)
