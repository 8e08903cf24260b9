"""Parses the JSON of exports, in which most objects are reduced to little at once, so that they take little memory."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sebp_edge.texts.documents import Unreadable
from sebp_edge.texts.formats.records import json_fault


def reduce_objects(text: str, reduce: Callable[[dict[str, Any]], Any]) -> tuple[Any, Unreadable | None]:
    """Returns the value in a text, with each object replaced by what `reduce` makes of it, from the inside out.

    The second value is the fault that ended the reading; the first one is None then.
    """
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: reduce(dict(pairs))), None
    except (ValueError, RecursionError) as error:
        return None, json_fault(error)


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
