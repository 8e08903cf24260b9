"""Reads the `conversations.json` of ChatGPT and of Claude; of ChatGPT, the branch of each conversation that was shown.

The owner's words are the user's. An assistant's replies are what the owner answered, so they are context.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.values.chats import OWNER, Chat, ChatMessage
from sebp_edge.values.documents import NotRead, Unreadable

_CHATGPT_AUTHORS = {"user": OWNER, "assistant": "ChatGPT"}
_WORDS = ("text", "multimodal_text")


def read_chatgpt(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the conversations, and what cannot be used in their place."""
    for number, value in enumerate(reduced_values(text, _chatgpt_value), start=1):
        if isinstance(value, Chat | Unreadable):
            yield replace(value, id=value.id or str(number)) if isinstance(value, Chat) else value
        else:
            yield Unreadable("a conversation of ChatGPT of an unknown version")


def _chatgpt_value(value: dict[str, Any]) -> Any:
    if isinstance(value.get("mapping"), dict):
        return _chatgpt_conversation(value)
    if "parent" in value and "message" in value:
        return value["parent"], value["message"]
    return _chatgpt_message(value) if "author" in value and "content" in value else value


def _chatgpt_message(value: dict[str, Any]) -> ChatMessage | NotRead | None:
    """Returns a message, the kind of one that is left out, or None for one without words."""
    author, content, metadata = value["author"], value["content"], value.get("metadata")
    if not (isinstance(author, dict) and isinstance(content, dict)):
        return NotRead("messages of an unknown form")
    hidden = isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation")
    name = _CHATGPT_AUTHORS.get(author.get("role"))
    if name is None or hidden or content.get("content_type") not in _WORDS or value.get("recipient", "all") != "all":
        return NotRead("messages of tools and hidden messages")
    parts = content.get("parts")
    if not isinstance(parts, list):
        return NotRead("messages of an unknown form")
    # What was spoken has a text, pictures have none.
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    said = "\n".join(text for text in texts if isinstance(text, str)).strip()
    if not said:
        return NotRead("attachments") if any(isinstance(part, dict) for part in parts) else None
    return ChatMessage(name, day_of(value.get("create_time")), said)


def _chatgpt_conversation(value: dict[str, Any]) -> Chat | Unreadable:
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
        elif isinstance(message, NotRead):
            left_out[message.reason] += 1
    left_out["messages of branches that were not shown"] = sum(
        isinstance(node, tuple) and isinstance(node[1], ChatMessage) for node in nodes.values()
    )
    id = value.get("conversation_id") or value.get("id")
    return Chat("ChatGPT", id[:8] if isinstance(id, str) else "", messages, owner=OWNER, left_out=left_out)


# ------------------------------------------------------------------------------------------- Claude

_CLAUDE_AUTHORS = {"human": OWNER, "assistant": "Claude"}


def read_claude(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the conversations, and a fault that ended the reading."""
    for value in reduced_values(text, _claude_value):
        is_known = isinstance(value, Chat | Unreadable)
        yield value if is_known else Unreadable("a conversation of Claude of an unknown version")


def _claude_value(value: dict[str, Any]) -> Any:
    if isinstance(value.get("chat_messages"), list):
        left_out = Counter(each.reason for each in value["chat_messages"] if isinstance(each, NotRead))
        messages = [each for each in value["chat_messages"] if isinstance(each, ChatMessage)]
        return Chat("Claude", str(value.get("uuid", ""))[:8], messages, owner=OWNER, left_out=left_out)
    return _claude_message(value) if "sender" in value else value


def _claude_message(value: dict[str, Any]) -> ChatMessage | NotRead:
    """Returns a message, or the kind of one that is left out."""
    parts, said = value.get("content"), value.get("text")
    if isinstance(parts, list) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        said = "\n".join(text for text in texts if isinstance(text, str))
    author = _CLAUDE_AUTHORS.get(value["sender"]) if isinstance(value["sender"], str) else None
    if author is None or not isinstance(said, str):
        return NotRead("messages of an unknown form")
    if not said.strip():
        return NotRead("messages without words")
    return ChatMessage(author, day_of(value.get("created_at")), said.strip())
