"""Formats sizes, durations, shares and counts for people."""

from collections.abc import Sequence


def gigabytes(size: float) -> str:
    """Formats a size in bytes: "6.4 GB" (10^9 bytes), or "26 MB" below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def parameters(number: float) -> str:
    """Formats a number of parameters: "3.21 billion", or "135 million" below a billion."""
    rounded = float(f"{number:.3g}")
    return f"{rounded / 1e9:g} billion" if rounded >= 1e9 else f"{rounded / 1e6:g} million"


def sizes_apart(*sizes: float) -> list[str]:
    """Formats sizes that a sentence compares: in MB, or in bytes, if different ones would look the same."""
    in_bytes = [f"{size:,.0f} bytes" for size in sizes]
    return _apart(sizes, [[*map(gigabytes, sizes)], [f"{size / 1e6:,.0f} MB" for size in sizes], in_bytes])


def percent(share: float, digits: int = 1) -> str:
    """Formats a share: "13.1 %"; never "-0.0 %"."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def percents_apart(*shares: float) -> list[str]:
    """Formats shares that a sentence compares: with more digits if different ones would look the same."""
    return _apart(shares, [[percent(share, digits) for share in shares] for digits in range(1, 5)])


def duration(seconds: float) -> str:
    """Formats a time in seconds: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plural(number: int, what: str) -> str:
    """Formats a count of things: "1 document", "1,200 documents"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def some(names: Sequence[str], most: int) -> str:
    """Formats a list of names of which at most so many are said: "a, b and 7 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def are(number: int) -> str:
    """Returns the verb after a count: "is" or "are"."""
    return "is" if number == 1 else "are"


def _apart(numbers: Sequence[float], formatted: list[list[str]]) -> list[str]:
    """Returns the first of several ways to format numbers in which different ones differ, or else the last."""
    return next((shown for shown in formatted if len({*shown}) == len({*numbers})), formatted[-1])
