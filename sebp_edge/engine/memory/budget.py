"""MemoryBudget: how much memory an adaptation may use, as a person or an app gives it."""

import re
from dataclasses import dataclass

from sebp_edge.basics.units import gigabytes, sizes_apart
from sebp_edge.errors import OptionError

_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# In bytes. A smaller text or number is one whose unit was forgotten; plans of very small models take less than 1 MB.
_LEAST_TEXT, _LEAST_NUMBER, _MOST = 10**6, 10**5, 9 * 10**18


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory an adaptation may use, in bytes: GPU memory, or on the CPU the memory of the process."""

    size: int  # the available bytes
    requested: int | None = None  # the requested bytes, if more than are available; else None

    @classmethod
    def parse(cls, text: "str | int | MemoryBudget", what: str = "memory budget") -> "MemoryBudget":
        """Parses "8GB" (10^9 bytes each), "7.5 GiB" (2^30) or "8000MB", or takes a number of bytes."""
        if isinstance(text, MemoryBudget):
            return text
        if isinstance(text, str):
            found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
            size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
            least, expected = _LEAST_TEXT, "a size with a unit, such as '8GB', '7.5GiB' or '8000MB', from 1 MB"
        else:
            size = text if isinstance(text, int) and not isinstance(text, bool) else 0
            least, expected = _LEAST_NUMBER, "a number of bytes, or a text such as '8GB', from 0.1 MB"
        if not least <= size <= _MOST:
            shown = f"above {_MOST:.0e}" if isinstance(text, int) and text > _MOST else repr(text)
            raise OptionError(f"The {what} is {shown}, but must be {expected} to 9 EB.")
        return cls(size)

    def within(self, free: int) -> "MemoryBudget":
        """Returns this budget, limited to `free` bytes."""
        return self if self.size <= free else MemoryBudget(free, requested=self.size)

    def __str__(self) -> str:
        if self.requested is None:
            return gigabytes(self.size)
        requested, left = sizes_apart(self.requested, self.size)
        return f"{requested}, of which other programs leave {left}"
