"""Lays out text as lines, paragraphs, lists and tables, piece by piece, in linear time."""

from dataclasses import dataclass, field

# A block of text, and whether it is an item of a list.
Block = tuple[str, bool]
# What separates two texts.
SPACE, LINE, PARAGRAPH = 1, 2, 3
_SEPARATORS = ("", " ", "\n", "\n\n")
# A longer table row with several lines in a cell is laid out as paragraphs, in characters.
LONGEST_ROW = 1000
# Of a list within lists, in levels.
MAX_INDENT = 9


def joined(blocks: list[Block]) -> str:
    """Returns the blocks as one text: items of lists on lines of their own, all else with blank lines between."""
    pieces, after_item = [], False
    for text, is_item in blocks:
        if pieces:
            pieces.append("\n" if is_item and after_item else "\n\n")
        pieces.append(text)
        after_item = is_item
    return "".join(pieces)


@dataclass(slots=True)
class _Row:
    """A table's row that is open.

    Attributes:
        start: the number of pieces before it.
        gap: what separates it from the text before it.
        is_fresh: whether it begins the text, or a cell.
        cells: the indices of the pieces that separate its cells.
        has_cell: whether a cell was begun.
        has_paragraphs: whether a cell has several, or lines that must be kept.
    """

    start: int
    gap: int
    is_fresh: bool
    cells: list[int] = field(default_factory=list)
    has_cell: bool = False
    has_paragraphs: bool = False


class Layout:
    """Collects the pieces of a text."""

    def __init__(self):
        self._pieces: list[str] = []
        # What separates the next text, what stands before it in a list, and whether it begins the text or a cell.
        self._gap, self._marker, self._is_fresh = 0, "", True
        # The next number of each open list, None without numbers.
        self._lists: list[int | None] = []
        self._rows: list[_Row] = []

    def text(self) -> str:
        """Returns the whole text."""
        return "".join(self._pieces).rstrip().lstrip("\n")

    def separate(self, gap: int) -> None:
        """Separates the next text by this at least."""
        self._gap = max(self._gap, gap)

    def break_line(self) -> None:
        """Ends a line; two ends make a paragraph."""
        self._gap = LINE if self._gap < LINE else PARAGRAPH

    def add(self, text: str) -> None:
        """Adds text without line breaks."""
        if not self._is_fresh:
            self._pieces.append(_SEPARATORS[self._gap])
            if self._gap == PARAGRAPH and self._rows:
                self._rows[-1].has_paragraphs = True
        self._pieces += (self._marker, text)
        self._gap, self._marker, self._is_fresh = 0, "", False

    def add_lines(self, text: str) -> None:
        """Adds text whose line breaks are kept."""
        self.add(text)
        if self._rows and "\n" in text:
            self._rows[-1].has_paragraphs = True

    def end_lines(self) -> None:
        """Ends text whose line breaks are kept."""
        if self._pieces:
            self._pieces[-1] = self._pieces[-1].rstrip()

    def begin_list(self, number: int | None) -> None:
        """Begins a list, with this number or without numbers. A list within a list is no paragraph."""
        self.separate(LINE if self._lists else PARAGRAPH)
        self._lists.append(number)

    def end_list(self) -> None:
        self._lists.pop()
        self._marker = ""  # Of an item without text.
        self.separate(LINE if self._lists else PARAGRAPH)

    def begin_item(self, number: int | None) -> None:
        """Begins an item of a list, with the list's next number or this one."""
        self.separate(LINE)
        self._marker = "  " * min(len(self._lists) - 1, MAX_INDENT) + "- "
        if self._lists and self._lists[-1] is not None:
            number = self._lists[-1] if number is None else number
            self._lists[-1] = number + 1
            self._marker = self._marker.replace("-", f"{number}.")

    def begin_row(self) -> None:
        self.separate(LINE)
        if self._rows:
            self._rows[-1].has_paragraphs = True  # What holds tables lays a page out.
        self._rows.append(_Row(len(self._pieces), self._gap, self._is_fresh))
        if not self._is_fresh:
            self._pieces.append(_SEPARATORS[self._gap])
        self._begin_fresh()

    def begin_cell(self) -> None:
        """Begins a cell of the open row, if there is one."""
        if not self._rows:
            return
        row = self._rows[-1]
        if row.has_cell:
            row.cells.append(len(self._pieces))
            self._pieces.append("")
        row.has_cell = True
        self._begin_fresh()

    def _begin_fresh(self) -> None:
        self._gap, self._marker, self._is_fresh = 0, "", True

    def end_row(self) -> None:
        """Ends a row: separates its cells by bars, or as paragraphs if one has paragraphs."""
        row, pieces = self._rows.pop(), self._pieces
        begin = row.start + (not row.is_fresh)
        while row.cells and row.cells[-1] == len(pieces) - 1:
            del pieces[row.cells.pop() :]  # Empty cells at the end.
        self._marker, self._is_fresh = "", row.is_fresh and len(pieces) == begin
        if len(pieces) == begin:
            del pieces[row.start :]
            self._gap = row.gap
            return
        if row.cells and not row.has_paragraphs:
            lines = [index for index in range(begin, len(pieces)) if pieces[index] == "\n"]
            if lines and sum(len(pieces[index]) for index in range(begin, len(pieces))) > LONGEST_ROW:
                row.has_paragraphs = True
            else:
                for index in lines:
                    pieces[index] = " "
        previous = begin - 1
        for index in row.cells:
            is_empty = index == previous + 1
            if row.has_paragraphs:
                pieces[index] = "" if is_empty else "\n\n"
            else:
                pieces[index] = "| " if is_empty else " | "
            previous = index
        self._gap = PARAGRAPH if row.has_paragraphs else LINE

    def mark(self) -> tuple[int, bool]:
        """Returns a mark of this place for `cut`."""
        return len(self._pieces), self._is_fresh

    def cut(self, mark: tuple[int, bool]) -> None:
        """Takes out all after a mark. No row that is open may have begun after it."""
        start, self._is_fresh = mark
        del self._pieces[start:]
