"""Finds dates, times and numbers in texts, in one form however they are written."""

import re

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])")


def plain_numbers(text: str) -> str:
    """Returns a text with "1,200" as "1200"."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
