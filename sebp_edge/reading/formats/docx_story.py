"""What is open at a place of a Word file: its story, fields and table, the properties that are read, and a formula.

A field without a result shows what the page does, from its code or its data.
"""

import re
from dataclasses import dataclass, field

from sebp_edge.reading.formats.docx_styles import Fonts
from sebp_edge.reading.formats.layout import Block
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


@dataclass(slots=True)
class Story:
    """A run of paragraphs: the body, a note, a text box or a cell.

    Attributes:
        blocks: the finished paragraphs and tables.
        pieces: the text of the paragraph so far.
        fields: those around the current place, the innermost last.
        codes: those of them in whose code it is.
        is_hidden: whether all of it is.
        goes_on: whether the next paragraph continues this one, since the mark between them is deleted or hidden.
        run_is_hidden: whether the current run is; None if the paragraph's style decides.
        run_style, run_fonts: the style of the current run and its fonts; None if its style or the paragraph's decides.
        reading, reading_start: how the next word is read (in East Asian text), and where that begins among the pieces.
        note: the id of the note that it is, if any.
    """

    is_hidden: bool = False
    blocks: list[Block] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    boxes: list[Block] = field(default_factory=list)
    fields: list[Field] = field(default_factory=list)
    codes: list[Field] = field(default_factory=list)
    style: str = ""
    list_id: int | None = None
    list_level: int | None = None
    goes_on: bool = False
    run_is_hidden: bool | None = None
    run_style: str = ""
    run_fonts: Fonts | None = None
    reading: str = ""
    reading_start: int = 0
    note: str = ""

    def end_run(self) -> None:
        """Forgets what the current run is like."""
        self.run_is_hidden, self.run_style, self.run_fonts = None, "", None


@dataclass(slots=True)
class Table:
    """A table: its finished blocks, the lines of the rows after them, and the cells of the current row."""

    blocks: list[Block] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    cells: list[list[Block]] = field(default_factory=list)
    row_is_deleted: bool = False
    num_rows: int = 0

    def end_lines(self) -> None:
        """Makes the lines so far a block."""
        if text := "\n".join(line for line in self.lines if line.strip(" |")):
            self.blocks.append((text, False))
        self.lines = []


@dataclass(slots=True)
class Properties:
    """The properties around the current place.

    Attributes:
        of: the element that they are in, or "mark" for those of a paragraph's end; "" outside of any.
        depth: how many elements are open within it.
        mark: where in these the paragraph's end is.
    """

    of: str = ""
    depth: int = 0
    mark: int = 0


@dataclass(slots=True)
class Formula:
    """Of a formula, what stands before the next text, the sign of the sum or integral, and the closing brackets."""

    operator: str = ""
    sum: str = ""
    brackets: list[str] = field(default_factory=list)
