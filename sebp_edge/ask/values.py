"""Finds dates, times and numbers in texts, in one form however they are written."""

import re
from typing import NamedTuple

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Rare, and found ten times faster than numbers.
_COMMA = re.compile(r",(?<=\d,)\d")
_DIGIT = re.compile(r"\d")

# The beginnings of months' names, without accents, in English, German, Dutch, French, Spanish, Italian and others.
_MONTHS = (
    "jan|gen|ene",
    "feb|fev|fevr",
    "mar|mrz|maer|maar|mrt",
    "apr|avr|abr",
    "may|mai|mei|mag|maj",
    "jun|juin|giu",
    "jul|juil|lug",
    "aug|aou|ago",
    "sep|set",
    "oct|okt|ott|out",
    "nov",
    "dec|dez|dic",
)
_MONTH = rf"({'|'.join(sorted('|'.join(_MONTHS).split('|'), key=len, reverse=True))})[a-z]{{0,6}}\.?"
_YEAR = r"((?:19|20)\d\d)"
_ISO = re.compile(rf"(?<!\d){_YEAR}[-/.](\d\d?)[-/.](\d\d?)(?!\d)")
_EAST_ASIAN = re.compile(rf"(?:{_YEAR}[年년] ?)?(\d\d?)[月월] ?(\d\d?)[日号일]")
_DAY_FIRST = re.compile(rf"(?<![\d.,])(\d\d?)(?:st|nd|rd|th|er|\.)? (?:(?:of|de) )?{_MONTH}\b(?:,? (?:de )?{_YEAR})?")
_MONTH_FIRST = re.compile(rf"\b{_MONTH} (?:the )?(\d\d?)(?:st|nd|rd|th)?(?![\d:.])(?:,? {_YEAR})?")
_NUMBERS = re.compile(rf"(?<![\d/.])(\d\d?)([/.])(\d\d?)(?:\2{_YEAR}|\2(\d\d)|(?<=/\d\d)|(?<=/\d))(?![\d/])")
_TIME = re.compile(r"(?<![\d.,:])(\d\d?)(?:[:.h](\d\d))? ?([ap])\.?m\b|(?<![\d.,:])([01]?\d|2[0-3]):([0-5]\d)(?!\d)")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Date(NamedTuple):
    """A day, "03-04" for 4 March, and its year, if it has one; `other` is the day if "03/04" is read the other way."""

    day: str
    year: str | None = None
    other: str | None = None

    def may_be(self, other: "Date") -> bool:
        """Whether both can be the same day; a year that one of them lacks says nothing against it."""
        same_year = self.year is None or other.year is None or self.year == other.year
        return same_year and bool({self.day, self.other} & {other.day, other.other} - {None})


class Values(NamedTuple):
    """The dates of a text, its times as minutes of the day, its other numbers as digits, and the words besides."""

    dates: list[Date]
    times: set[int]
    numbers: set[str]
    rest: str


def plain_numbers(text: str) -> str:
    """Returns a text with "1,200" as "1200"."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text) if _COMMA.search(text) else text


def date_terms(text: str) -> list[str]:
    """Returns terms for the days in a plain text, by which they are found however they are written."""
    # No pattern goes over the end of a line, and most lines have no digit.
    lines = "\n".join(line for line in text.split("\n") if _DIGIT.search(line))
    return [f"d{day.replace('-', '')}" for date in _dates(lines)[0] for day in (date.day, date.other) if day]


def values(text: str) -> Values:
    """Returns the values in a plain text."""
    dates, rest = _dates(plain_numbers(text))
    times: set[int] = set()

    def take(found: re.Match) -> str:
        hour, minute = int(found[1] or found[4]), int(found[2] or found[5] or 0)
        times.add(60 * (hour % 12 + 12 * (found[3] == "p") if found[3] else hour) + minute)
        return " "

    rest = _TIME.sub(take, rest)
    numbers = {number.replace(",", ".") for number in _NUMBER.findall(rest)}
    return Values(
        dates, times, {re.sub(r"\.00$", "", number).lstrip("0") or "0" for number in numbers}, _NUMBER.sub(" ", rest)
    )


def _dates(text: str) -> tuple[list[Date], str]:
    """Returns the dates in a text, and the text without them."""
    if not _DIGIT.search(text):
        return [], text
    found: list[Date] = []

    def add(year: str | None, month: int, day: int, *, may_turn: bool = False) -> bool:
        turned = f"{day:02}-{month:02}" if may_turn and 1 <= day <= 12 and 1 <= month <= 31 else None
        if 1 <= month <= 12 and 1 <= day <= 31:
            found.append(Date(f"{month:02}-{day:02}", year, turned))
        elif turned:
            found.append(Date(turned, year))
        return bool(turned) or (1 <= month <= 12 and 1 <= day <= 31)

    def taken(is_date: bool, match: re.Match) -> str:
        return " " if is_date else match[0]

    text = _ISO.sub(lambda at: taken(add(at[1], int(at[2]), int(at[3])), at), text)
    text = _EAST_ASIAN.sub(lambda at: taken(add(at[1], int(at[2]), int(at[3])), at), text)
    text = _DAY_FIRST.sub(lambda at: taken(add(at[3], _month(at[2]), int(at[1])), at), text)
    text = _MONTH_FIRST.sub(lambda at: taken(add(at[3], _month(at[1]), int(at[2])), at), text)

    def numeric(at: re.Match) -> str:
        year = at[4] or (at[5] and f"20{at[5]}")
        return taken(add(year, int(at[3]), int(at[1]), may_turn=at[2] == "/"), at)

    return found, _NUMBERS.sub(numeric, text)


def _month(beginning: str) -> int:
    return next(number for number, names in enumerate(_MONTHS, 1) if beginning in names.split("|"))
