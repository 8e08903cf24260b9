"""Reads what messengers export.

Telegram    `result.json`, of one chat or of all; what was forwarded or made by a bot is nobody's own words
Slack       `users.json`, and a file of each day and channel; a thread is a chat by itself
Discord     the package of one's data, which has the owner's words only
"""

import csv
import html
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.reading.formats.record_files import long_fields
from sebp_edge.values.chats import OWNER, Chat, ChatMessage, Names
from sebp_edge.values.documents import NotRead, Unreadable

_MEDIA = ("photo", "file", "media_type", "location_information", "contact_information", "poll", "game_title")


def read_telegram(text: str) -> Iterator[Chat | Unreadable]:
    """Yields the chats, and a fault that ended the reading."""
    found: list[Chat] = []
    names: dict[str, str] = {}
    owner: list[str] = []

    def reduce(value: dict[str, Any]) -> Any:
        if value.get("type") in ("message", "service") and ("from" in value or "actor" in value or "date" in value):
            return _telegram_message(value, names)
        if "user_id" in value and "phone_number" in value:
            # The export of all chats begins with its owner.
            owner.append(f"user{value['user_id']}")
        elif isinstance(value.get("messages"), list):
            left_out = Counter(each.reason for each in value["messages"] if isinstance(each, NotRead))
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


def _telegram_message(value: dict[str, Any], names: dict[str, str]) -> ChatMessage | NotRead:
    """Returns a message, or the kind of one that is left out."""
    if value["type"] != "message":
        return NotRead("calls" if value.get("action") in ("phone_call", "group_call") else "system lines")
    if "forwarded_from" in value or "saved_from" in value:
        return NotRead("forwarded messages")
    if "via_bot" in value:
        return NotRead("messages of bots")
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
        return NotRead("messages of an unknown form")
    said = "".join(texts).strip()
    if not said:
        return NotRead("attachments" if any(key in value for key in _MEDIA) else "messages without words")
    names.setdefault(author, name)
    return ChatMessage(sys.intern(author), day, said)


# -------------------------------------------------------------------------------------------- Slack

# What people write; other subtypes are Slack's own lines.
_BY_PEOPLE = (None, "me_message", "thread_broadcast", "file_share", "file_comment")
_LINK = re.compile(r"<([#!]?)([^<>|@][^<>|]*)(?:\|([^<>]*))?>")


def read_slack_day(text: str, channel: str, day: str) -> Iterator[Chat | Unreadable]:
    """Yields what was said in a channel on a day.

    Args:
        day: the date in the file's name; one that is none is taken from each message.
    """
    threads: defaultdict[str, list[ChatMessage]] = defaultdict(list)
    left_out, names, day = Counter(), {}, day_of(day)

    def reduce(value: dict[str, Any]) -> Any:
        if value.get("type") != "message" or "ts" not in value:
            return value
        said = _slack_message(value, day, names)
        if isinstance(said, NotRead):
            left_out[said.reason] += 1
        else:
            threads[value.get("thread_ts", "")].append(said)
        return None

    faults = [value for value in reduced_values(text, reduce) if isinstance(value, Unreadable)]
    threads = threads or {"": []}
    for thread, messages in threads.items():
        yield Chat("Slack", f"{channel} {thread}".strip(), messages, names, left_out=left_out)
        left_out = Counter()
    yield from faults


def read_slack_users(text: str) -> Iterator[Names | Unreadable]:
    """Yields the names of people."""
    users = list(reduced_values(text, lambda value: value))
    yield from (fault for fault in users if isinstance(fault, Unreadable))
    names = {user.get("id"): _slack_name(user) for user in users if isinstance(user, dict)}
    yield Names("Slack", {id: name for id, name in names.items() if isinstance(id, str) and name})


def _slack_name(user: dict[str, Any]) -> str | None:
    profile = user.get("profile", user.get("user_profile"))
    named = {**user, **(profile if isinstance(profile, dict) else {})}
    names = (named.get(key) for key in ("display_name", "real_name", "name"))
    return next((name for name in names if isinstance(name, str) and name.strip()), None)


def _slack_message(value: dict[str, Any], day: str, names: dict[str, str]) -> ChatMessage | NotRead:
    """Returns a message, or the kind of one that is left out."""
    author, said, subtype = value.get("user"), value.get("text"), value.get("subtype")
    if subtype == "tombstone":
        return NotRead("deleted messages")
    if subtype == "bot_message" or value.get("bot_id"):
        return NotRead("messages of bots")
    if subtype not in _BY_PEOPLE:
        return NotRead("system lines")
    if subtype == "file_share" and "file" in value:
        # Exports until 2018 describe the file in the text.
        comment = value["file"].get("initial_comment") if isinstance(value["file"], dict) else None
        said = comment.get("comment") if isinstance(comment, dict) else ""
    if said is None and value.get("files"):
        said = ""
    if not (isinstance(author, str) and isinstance(said, str)):
        return NotRead("messages of an unknown form")
    if not said.strip():
        return NotRead("attachments" if value.get("files") or "file" in value else "messages without words")
    if name := _slack_name(value) if "user_profile" in value else None:
        names.setdefault(author, name)
    seconds = value["ts"].partition(".")[0] if isinstance(value["ts"], str) else ""
    day = day or day_of(int(seconds) if seconds.isdecimal() else None)
    return ChatMessage(sys.intern(author), day, html.unescape(_LINK.sub(_shown_link, said)).strip())


def _shown_link(link: re.Match) -> str:
    """Returns what Slack shows of a link, a channel or a word such as @here."""
    sign, target, label = link.groups()
    return {"#": "#", "!": "@"}.get(sign, "") + (label or target).removeprefix("@")


# ------------------------------------------------------------------------------------------ Discord

_EMOJI = re.compile(r"<a?(:\w+:)\d+>")


def read_discord_json(text: str, channel: str) -> Iterator[Chat | Unreadable]:
    """Yields what the owner wrote in a channel."""
    rows = list(reduced_values(text, lambda value: value))
    yield _discord_chat((row for row in rows if not isinstance(row, Unreadable)), channel)
    yield from (fault for fault in rows if isinstance(fault, Unreadable))


def read_discord_csv(text: str, channel: str) -> Iterator[Chat | Unreadable]:
    """Yields what the owner wrote in a channel."""
    with long_fields():
        try:
            yield _discord_chat(list(csv.DictReader(io.StringIO(text, newline=""), strict=True)), channel)
        except csv.Error:
            yield Unreadable("a row whose quotes are not valid CSV")


def _discord_chat(rows: Iterable[Any], channel: str) -> Chat | Unreadable:
    found, left_out = [], Counter()
    for row in rows:
        said, time = (row.get("Contents"), row.get("Timestamp")) if isinstance(row, dict) else (None, None)
        if not isinstance(said, str) or not isinstance(time, str) or not day_of(time):
            left_out["messages of an unknown form"] += 1
        elif not said.strip():
            left_out["attachments" if row.get("Attachments") else "messages without words"] += 1
        else:
            found.append((time, ChatMessage(OWNER, day_of(time), _EMOJI.sub(r"\1", said).strip())))
    if not found:
        return Unreadable("a Discord channel in which the owner wrote nothing")
    # The package has the last message first.
    found.sort(key=lambda pair: pair[0])
    return Chat("Discord", channel, [message for _, message in found], owner=OWNER, left_out=left_out)
