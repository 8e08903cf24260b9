"""Reads the messages in Discord's package of one's data, which has the owner's words only."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from sebp_edge.reading.exports.objects import day_of, reduced_values
from sebp_edge.reading.formats.record_files import long_fields
from sebp_edge.values.chats import OWNER, Chat, ChatMessage
from sebp_edge.values.documents import Unreadable

_EMOJI = re.compile(r"<a?(:\w+:)\d+>")


def read_discord_json(text: str, channel: str) -> Iterator[Chat | Unreadable]:
    """Yields what the owner wrote in a channel."""
    rows = list(reduced_values(text, lambda value: value))
    yield _chat((row for row in rows if not isinstance(row, Unreadable)), channel)
    yield from (fault for fault in rows if isinstance(fault, Unreadable))


def read_discord_csv(text: str, channel: str) -> Iterator[Chat | Unreadable]:
    """Yields what the owner wrote in a channel."""
    with long_fields():
        try:
            yield _chat(list(csv.DictReader(io.StringIO(text, newline=""), strict=True)), channel)
        except csv.Error:
            yield Unreadable("a row whose quotes are not valid CSV")


def _chat(rows: Iterable[Any], channel: str) -> Chat | Unreadable:
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
