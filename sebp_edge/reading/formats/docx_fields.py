"""The fields of a Word file, and what the page shows of those without a result, from their code or their data."""

import re
from dataclasses import dataclass, field

from sebp_edge.reading.formats.xml_parts import Attributes, attribute, is_on, number

# The elements with a field's data.
DATA = {"checkBox", "checked", "ddList", "default", "listEntry", "result"}
_PROMPT = re.compile(r'\s*(?:MACROBUTTON|GOTOBUTTON)\s+(?:"[^"]*"|\S+)\s+(.*\S)', re.IGNORECASE | re.DOTALL)
_COMPUTED = re.compile(r"\s*(?:EQ|AUTONUM\w*|LISTNUM|SYMBOL)\b", re.IGNORECASE)


@dataclass(slots=True)
class Field:
    """A field around the current place.

    Attributes:
        num_texts: the number of texts before its result; None within its code.
        entries, chosen: those of a list to choose from, and the index of one.
    """

    code: list[str] = field(default_factory=list)
    num_texts: int | None = None
    entries: list[str] = field(default_factory=list)
    chosen: int | None = None
    box: str = ""

    def read_data(self, name: str, attributes: Attributes) -> None:
        """Reads an element of `DATA`, in the order of the format."""
        if name == "checkBox":
            self.box = "☐"
        elif name == "listEntry":
            self.entries.append(attribute(attributes))
        elif self.box:
            self.box = "☒" if is_on(attributes) else "☐"
        elif name in ("result", "default") and self.chosen is None:
            self.chosen = number(attributes)

    def shown(self) -> str | None:
        """Returns what the page shows if it has no result; None if Word computes that from its code."""
        code = "".join(self.code)
        if prompt := _PROMPT.match(code):
            return prompt[1]
        return None if _COMPUTED.match(code) else self.box or "".join(self.entries[self.chosen or 0 :][:1])
