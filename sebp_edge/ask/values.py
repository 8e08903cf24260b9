"""Finds dates, times and numbers in texts, in one form however they are written."""

import re
from typing import NamedTuple

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Rare, and found ten times faster than numbers.
_COMMA = re.compile(r",(?<=\d,)\d")
_DIGIT = re.compile(r"\d")

# The months, without accents, in English, German, Dutch, French, Spanish, Italian, Portuguese, Polish, Turkish and
# Russian, and short forms that are no other words.
_MONTHS = """
january february march april may june july august september october november december
jan feb mar apr may jun jul aug sep oct nov dec
januar februar marz april mai juni juli august september oktober november dezember
jan feb mrz apr mai jun jul aug sept okt nov dez
januari februari maart april mei juni juli augustus september oktober november december
janvier fevrier mars avril mai juin juillet aout septembre octobre novembre decembre
janv fevr mrt avr maj juin juil aout sept oct nov dec
enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre
janeiro fevereiro marco abril maio junho julho agosto setembro outubro novembro dezembro
stycznia lutego marca kwietnia maja czerwca lipca sierpnia wrzesnia pazdziernika listopada grudnia
ocak subat mart nisan mayis haziran temmuz agustos eylul ekim kasim aralik
января февраля марта апреля мая июня июля августа сентября октября ноября декабря
"""
_NUMBER_OF = {name: number for names in _MONTHS.split("\n") for number, name in enumerate(names.split(), 1)}
MONTH = rf"(?:{'|'.join(sorted(_NUMBER_OF, key=len, reverse=True))})\b"
_NAME = rf"(?P<name>{MONTH})\.?"
_YEAR, _MONTH, _DAY = r"(?P<year>(?:19|20)\d\d)", r"(?P<month>\d\d?)", r"(?P<day>\d\d?)"
_MAYBE_DATE = re.compile(rf"\d[-/.]\d|[月월]|\b{MONTH}")
_DATES = tuple(
    map(
        re.compile,
        (
            rf"(?<!\d){_YEAR}[-/.]{_MONTH}[-/.]{_DAY}(?!\d)",
            rf"(?:{_YEAR}[年년] ?)?{_MONTH}[月월] ?{_DAY}[日号일]",
            rf"(?<![\d.,]){_DAY}(?:st|nd|rd|th|er|\.)? (?:(?:of|de) )?{_NAME}(?:,? (?:de )?{_YEAR})?",
            rf"\b{_NAME} (?:the )?{_DAY}(?:st|nd|rd|th)?(?![\d:.])(?:,? {_YEAR})?",
            rf"\b(?:am|ab|bis|vom|zum|seit) {_DAY}\.{_MONTH}\.(?!\d)",
            rf"(?<![\d/.-]){_DAY}(?P<mark>[/.-]){_MONTH}"
            rf"(?:(?P=mark){_YEAR}|(?<!-\d)(?<!-\d\d)(?P=mark)(?P<short>\d\d)|(?<=/\d\d)|(?<=/\d))(?![\d/])",
        ),
    )
)
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
    # No pattern goes over the end of a line, and most lines have no date.
    lines = "\n".join(line for line in text.split("\n") if _DIGIT.search(line) and _MAYBE_DATE.search(line))
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
    found: list[Date] = []

    def take(at: re.Match) -> str:
        date = _date(**at.groupdict())
        found.extend(date)
        return " " if date else at[0]

    if _DIGIT.search(text):
        for pattern in _DATES:
            text = pattern.sub(take, text)
    return found, text


def _date(day: str, month: str = "", name: str = "", year: str | None = None, short: str | None = None, mark: str = ""):
    """Returns the date that a pattern has found, in a list that is empty if there is no such day."""
    orders = [(int(month or _NUMBER_OF[name]), int(day))]
    if mark == "/":
        orders.append(orders[0][::-1])
    days = [f"{month:02}-{day:02}" for month, day in orders if 1 <= month <= 12 and 1 <= day <= 31]
    return [Date(days[0], year or (short and f"20{short}"), *days[1:])] if days else []
