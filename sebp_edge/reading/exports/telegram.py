"""Reads Telegram's `result.json`, of one chat or of all. What was forwarded or made by a bot is nobody's own words."""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.values.chats import Chat, ChatMessage
from sebp_edge.values.documents import Unreadable

_MEDIA = ("photo", "file", "media_type", "location_information", "contact_information", "poll", "game_title")


def read_telegram(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the chats, and a fault that ended the reading."""
    found: list[Chat] = []
    names: dict[str, str] = {}
    owner: list[str] = []

    def reduce(value: dict[str, Any]) -> Any:
        if value.get("type") in ("message", "service") and ("from" in value or "actor" in value or "date" in value):
            return _message(value, names)
        if "user_id" in value and "phone_number" in value:
            # The export of all chats begins with its owner.
            owner.append(f"user{value['user_id']}")
        elif isinstance(value.get("messages"), list):
            left_out = Counter(each for each in value["messages"] if isinstance(each, str))
            messages = [each for each in value["messages"] if isinstance(each, ChatMessage)]
            found.append(Chat("Telegram", str(value.get("id", len(found) + 1)), messages, names, left_out=left_out))
            return None
        return value

    faults = [value for value in reduced_values(text, reduce) if isinstance(value, Unreadable)]
    for chat in found:
        chat.owner = next(iter(owner), None)
        yield chat
    yield from faults
    if not (found or faults):
        yield Unreadable("a Telegram export of an unknown version")


def _message(value: dict[str, Any], names: dict[str, str]) -> ChatMessage | str:
    """Returns a message, or the kind of one that is left out."""
    if value["type"] != "message":
        return "calls" if value.get("action") in ("phone_call", "group_call") else "system lines"
    if "forwarded_from" in value or "saved_from" in value:
        return "forwarded messages"
    if "via_bot" in value:
        return "messages of bots"
    parts, name = value.get("text"), value.get("from") or "Deleted account"
    author, day, seconds = value.get("from_id", name), day_of(value.get("date")), value.get("date_unixtime")
    if not day and isinstance(seconds, str) and seconds.isdecimal():
        day = day_of(int(seconds))
    # Older exports have numbers.
    author = f"user{author}" if isinstance(author, int) else author
    # A text with marks is a list of strings and objects.
    parts = parts if isinstance(parts, list) else [parts]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not (isinstance(author, str) and isinstance(name, str) and all(isinstance(text, str) for text in texts)):
        return "messages of an unknown form"
    said = "".join(texts).strip()
    if not said:
        return "attachments" if any(key in value for key in _MEDIA) else "messages without words"
    names.setdefault(author, name)
    return ChatMessage(sys.intern(author), day, said)
