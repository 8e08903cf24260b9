"""Reads the JSON of exports, in which most objects are reduced to little at once, so that they take little memory."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from sebp_edge.reading.formats.record_files import json_fault, values_of_list


def reduced_values(text: str, reduce: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    """Yields the values of the list that a text is, or its only value; then an Unreadable if a fault ended the reading.

    Args:
        reduce: is called with each object, from the inside out; what it returns takes the object's place.
    """
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: reduce(dict(pairs)))
    begin = len(text) - len(text.lstrip(" \t\r\n"))
    if text.startswith("[", begin):
        yield from values_of_list(text, begin, decoder)
        return
    try:
        yield decoder.raw_decode(text, begin)[0]
    except (ValueError, RecursionError) as error:
        yield json_fault(error)


def day_of(time: Any) -> str:
    """Returns the day of a time in ISO's form, or of seconds since 1970 in UTC; "" if it is neither."""
    if isinstance(time, str):
        try:
            return datetime.fromisoformat(time[:10]).strftime("%Y-%m-%d")
        except ValueError:
            return ""
    if isinstance(time, int | float) and 0 <= time < 1e11:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")
    return ""
