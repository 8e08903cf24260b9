"""Reads the files of Slack's export: `users.json`, and a file of each day and channel. A thread is a chat by itself."""

import html
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.values.chats import Chat, ChatMessage, Names
from sebp_edge.values.documents import Unreadable

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
        said = _message(value, day, names)
        if isinstance(said, str):
            left_out[said] += 1
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
    names = {user.get("id"): _name(user) for user in users if isinstance(user, dict)}
    yield Names("Slack", {id: name for id, name in names.items() if isinstance(id, str) and name})


def _name(user: dict[str, Any]) -> str | None:
    profile = user.get("profile", user.get("user_profile"))
    named = {**user, **(profile if isinstance(profile, dict) else {})}
    names = (named.get(key) for key in ("display_name", "real_name", "name"))
    return next((name for name in names if isinstance(name, str) and name.strip()), None)


def _message(value: dict[str, Any], day: str, names: dict[str, str]) -> ChatMessage | str:
    """Returns a message, or the kind of one that is left out."""
    author, said, subtype = value.get("user"), value.get("text"), value.get("subtype")
    if subtype == "tombstone":
        return "deleted messages"
    if subtype == "bot_message" or value.get("bot_id"):
        return "messages of bots"
    if subtype not in _BY_PEOPLE:
        return "system lines"
    if subtype == "file_share" and "file" in value:
        # Exports until 2018 describe the file in the text.
        comment = value["file"].get("initial_comment") if isinstance(value["file"], dict) else None
        said = comment.get("comment") if isinstance(comment, dict) else ""
    if said is None and value.get("files"):
        said = ""
    if not (isinstance(author, str) and isinstance(said, str)):
        return "messages of an unknown form"
    if not said.strip():
        return "attachments" if value.get("files") or "file" in value else "messages without words"
    if name := _name(value) if "user_profile" in value else None:
        names.setdefault(author, name)
    seconds = value["ts"].partition(".")[0] if isinstance(value["ts"], str) else ""
    day = day or day_of(int(seconds) if seconds.isdecimal() else None)
    return ChatMessage(sys.intern(author), day, html.unescape(_LINK.sub(_shown, said)).strip())


def _shown(link: re.Match) -> str:
    """Returns what Slack shows of a link, a channel or a word such as @here."""
    sign, target, label = link.groups()
    return {"#": "#", "!": "@"}.get(sign, "") + (label or target).removeprefix("@")
