"""Turns the main part of a Word file into text in one pass: what a person sees on the page.

That is also what stands in content controls, tracked insertions, text boxes and the results of fields, or in the codes
of fields that have none. Tracked deletions and hidden text are not seen.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from sebp_edge.reading.formats.docx_fields import DATA, Field
from sebp_edge.reading.formats.docx_styles import Fonts, Lists, Styles, fonts_of
from sebp_edge.reading.formats.layout import Block
from sebp_edge.reading.formats.signs import WITHOUT, has_signs, in_unicode
from sebp_edge.reading.formats.xml_parts import Attributes, Deadline, Handler, attribute, is_on, number

# What is read of the elements that describe others.
_PROPERTIES = {"pPr", "rPr", "trPr", "tcPr", "dPr", "naryPr"}
# Elements whose text is not shown.
_NOT_SHOWN = {"del", "moveFrom", "delText", "delInstrText", "sectPr", "tblGrid", "binData"}
# The same content for newer and older programs: the first that has text is read.
_ALTERNATIVES = {"Choice", "Fallback"}
_CHARACTERS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# What stands before a part of a formula.
_OPERATORS = {"den": "/", "sup": "^", "sub": "_"}
_LETTERS = re.compile(r"[\0-\x7f]+|[^\0-\x7f]+")
_INSERTED = "inserted files, which are read once you save this one in Word"


@dataclass(slots=True)
class _Story:
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


@dataclass(slots=True)
class _Table:
    """A table: its finished blocks, the lines of the rows after them, and the cells of the current row."""

    blocks: list[Block] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    cells: list[list[Block]] = field(default_factory=list)
    row_is_deleted: bool = False
    num_rows: int = 0

    def end_lines(self) -> None:
        if text := "\n".join(line for line in self.lines if line.strip(" |")):
            self.blocks.append((text, False))
        self.lines = []


class Text(Handler):
    """Handles the main part, or the part with the footnotes or endnotes.

    Attributes:
        references: the notes that the text refers to, as ("footnote" or "endnote", id), with their numbers.
        notes: the notes in this part, by id.
        left_out: how many things of a kind are not read.
        has_body: whether this is the main part of a Word file at all.
    """

    def __init__(self, styles: Styles, lists: Lists, deadline: Deadline):
        self.references: dict[tuple[str, str], int] = {}
        self.notes: dict[str, list[Block]] = {}
        self.left_out, self.has_body = Counter(), False
        self._styles, self._lists, self._deadline = styles, lists, deadline
        self._stories: list[_Story] = [_Story()]
        self._tables: list[_Table] = []
        # How many elements around this place are not shown; the element with properties around it, or "mark" for those
        # of a paragraph's end; how many elements are open within it, and where in these the mark is.
        self._skipped, self._property, self._depth, self._mark = 0, "", 0, 0
        # The pieces of the current text element, if any.
        self._text: list[str] | None = None
        # The number of texts so far, also when each alternative content began.
        self._num_texts, self._alternatives = 0, []
        # Of the formula: what stands before the next text, the sign of the sum or integral, and the closing brackets.
        self._operator, self._sum, self._brackets = "", "", []
        self._note = ""
        # How the next word is read (in East Asian text), and where that begins among the pieces.
        self._reading, self._reading_start = "", 0
        self._starts = {
            "body": self._start_body,
            "p": self._start_paragraph,
            "r": self._begin_or_end_run,
            "fldChar": self._field,
            "fldSimple": self._start_simple_field,
            "tbl": self._start_table,
            "tr": self._start_row,
            **dict.fromkeys(("tc", "txbxContent"), lambda _: self._start_story()),
            **dict.fromkeys(("footnote", "endnote"), self._start_note),
            "footnoteReference": lambda attributes: self._refer("footnote", attributes),
            "endnoteReference": lambda attributes: self._refer("endnote", attributes),
            "AlternateContent": lambda _: self._alternatives.append(self._num_texts),
            "sym": self._symbol,
            "textpath": lambda attributes: self._add(attribute(attributes, "string")),
            "rt": self._start_reading,
            "d": self._start_brackets,
            **dict.fromkeys(("altChunk", "subDoc"), lambda _: self._leave_out(_INSERTED)),
            **dict.fromkeys(("relIds", "chart"), lambda _: self._leave_out("diagrams and charts")),
        }
        self._ends = {
            "p": self._end_paragraph,
            "r": self._begin_or_end_run,
            "tbl": self._end_table,
            "tr": self._end_row,
            "fldSimple": self._end_field,
            "tc": self._end_cell,
            "txbxContent": self._end_box,
            **dict.fromkeys(("footnote", "endnote"), self._end_note),
            "AlternateContent": self._alternatives.pop,
            "rt": self._end_reading,
            "ruby": self._end_ruby,
            "d": lambda: self._add(self._brackets.pop()),
        }

    def blocks(self) -> list[Block]:
        """Returns the paragraphs and tables of the body."""
        return self._finished(self._stories[0])

    def start(self, name: str, attributes: Attributes) -> None:
        if self._skipped:
            self._skipped += 1
        elif self._property:
            self._start_property(name, attributes)
        elif name in _PROPERTIES:
            self._property, self._depth, self._sum = name, 0, "∫"
        elif name in _NOT_SHOWN or name.endswith("Pr") or (name in _ALTERNATIVES and self._has_alternative()):
            self._skipped = 1
        elif name in ("t", "instrText"):
            self._text = []
        elif name in DATA and self._stories[-1].fields:
            self._stories[-1].fields[-1].read_data(name, attributes)
        elif name in _CHARACTERS:
            self._add(_CHARACTERS[name])
        elif name in _OPERATORS:
            self._operator += _OPERATORS[name]
        elif start := self._starts.get(name):
            start(attributes)

    def text(self, text: str) -> None:
        if self._text is not None and not self._skipped:
            self._text.append(text)

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
        elif self._property:
            self._end_property(name)
        elif name in ("t", "instrText") and self._text is not None:
            text, self._text = "".join(self._text).replace("\n", " "), None
            if name == "t":
                story = self._stories[-1]
                styles = (self._styles.get(style).fonts for style in (story.run_style, story.style))
                fonts = next(filter(None, (story.run_fonts, *styles)), ("", ""))
                for letters in _LETTERS.findall(text) if fonts[0] != fonts[1] else [text]:
                    self._add_in_font(letters, fonts[not letters.isascii()])
            elif codes := self._stories[-1].codes:
                codes[-1].code.append(text)
        elif name in _OPERATORS:
            self._operator = ""
        elif end := self._ends.get(name):
            end()

    # ---------------------------------------------------------------------------------------- text

    def _is_seen(self) -> bool:
        story = self._stories[-1]
        hidden = story.run_is_hidden
        if hidden is None:
            hidden = self._styles.get(story.style).is_hidden
        return not (hidden or story.is_hidden or story.codes)

    def _has_alternative(self) -> bool:
        return bool(self._alternatives) and self._num_texts > self._alternatives[-1]

    def _add(self, text: str) -> None:
        story = self._stories[-1]
        if text and story.codes:
            story.codes[-1].code.append(text)  # The result of a field in the code of another.
        elif text and self._is_seen():
            story.pieces.append(self._operator + text)
            self._operator = ""
            self._num_texts += 1

    def _add_in_font(self, text: str, font: str) -> None:
        self._add(in_unicode(text, font, self.left_out if self._is_seen() else Counter()))

    def _leave_out(self, kind: str) -> None:
        if self._is_seen():
            self.left_out[kind] += 1

    def _symbol(self, attributes: Attributes) -> None:
        try:
            sign = chr(int(attribute(attributes, "char"), 16))
        except (ValueError, OverflowError):
            return
        font = attribute(attributes, "font")
        if "\ud800" <= sign < "\uf900" and not has_signs(font):
            self._leave_out(WITHOUT)  # A number in a font.
        elif sign >= " ":
            self._add_in_font(sign, font)

    def _start_reading(self, _: Attributes) -> None:
        self._reading_start = len(self._stories[-1].pieces)

    def _end_reading(self) -> None:
        # It stands before the word that it is the reading of.
        pieces = self._stories[-1].pieces
        self._reading = "".join(pieces[self._reading_start :])
        del pieces[self._reading_start :]

    def _end_ruby(self) -> None:
        if self._reading:
            self._add(f"({self._reading})")
        self._reading = ""

    def _refer(self, kind: str, attributes: Attributes) -> None:
        if self._is_seen():
            place = self.references.setdefault((kind, attribute(attributes, "id")), len(self.references) + 1)
            self._add(f"[^{place}]")

    def _start_brackets(self, _: Attributes) -> None:
        self._operator += "("
        self._brackets.append(")")

    def _field(self, attributes: Attributes) -> None:
        story = self._stories[-1]
        kind = attribute(attributes, "fldCharType")
        if kind == "begin":
            story.fields.append(Field())
            story.codes.append(story.fields[-1])
        elif kind == "end":
            self._end_field()
        elif story.fields:
            self._end_code()

    def _start_simple_field(self, attributes: Attributes) -> None:
        self._stories[-1].fields.append(Field([attribute(attributes, "instr")], self._num_texts))

    def _end_code(self) -> None:
        story = self._stories[-1]
        if story.fields[-1].num_texts is None:
            story.codes.pop().num_texts = self._num_texts

    def _end_field(self) -> None:
        if fields := self._stories[-1].fields:
            self._end_code()
            field = fields.pop()
            if field.num_texts == self._num_texts:
                if (shown := field.shown()) is None:
                    self._leave_out("fields that Word computes")
                self._add(shown or "")

    # ---------------------------------------------------------------------------------------- properties

    def _start_property(self, name: str, attributes: Attributes) -> None:
        story = self._stories[-1]
        if name.endswith("Change") or name in ("sectPr", "ctrlPr"):
            self._skipped = 1  # How it was before, or nothing about text.
            return
        self._depth += 1
        match self._property, name:
            case "pPr", "rPr":
                self._property, self._mark = "mark", self._depth
            case "pPr", "pStyle":
                story.style = attribute(attributes)
            case "pPr", "numId":
                story.list_id = number(attributes)
            case "pPr", "ilvl":
                story.list_level = number(attributes)
            case "pPr", "framePr" if attribute(attributes, "dropCap", "none") != "none":
                story.goes_on = True  # A large initial is a paragraph of its own.
            case "mark", "del" | "moveFrom":
                story.goes_on = True
            case "mark", "vanish" if is_on(attributes):
                story.goes_on = True
            case "rPr", "vanish":
                story.run_is_hidden = is_on(attributes)
            case "rPr", "rStyle":
                story.run_style = attribute(attributes)
                if story.run_is_hidden is None:
                    story.run_is_hidden = self._styles.get(story.run_style).is_hidden
            case "rPr", "rFonts":
                story.run_fonts = fonts_of(attributes)
            case "trPr", "del" if self._tables:
                self._tables[-1].row_is_deleted = True
            case "tcPr", "cellDel":
                story.is_hidden = True
            case "tcPr", "vMerge" | "hMerge" if attribute(attributes, default="continue") == "continue":
                # Without a cell to go on with, it is one of its own.
                table = self._tables[-1] if self._tables else _Table()
                story.is_hidden |= table.num_rows > 1 if name == "vMerge" else bool(table.cells)
            case "dPr", "begChr":
                self._operator = self._operator[:-1] + attribute(attributes)[:1]
            case "dPr", "endChr" if self._brackets:
                self._brackets[-1] = attribute(attributes)[:1]
            case "naryPr", "chr":
                self._sum = attribute(attributes)[:1]

    def _end_property(self, name: str) -> None:
        if not self._depth:
            self._property = ""
            if name == "naryPr":
                self._add(self._sum)
            return
        if self._property == "mark" and self._depth == self._mark:
            self._property = "pPr"
        self._depth -= 1

    # ---------------------------------------------------------------------------------------- paragraphs

    def _start_body(self, _: Attributes) -> None:
        self.has_body = True

    def _begin_or_end_run(self, *_) -> None:
        story = self._stories[-1]
        story.run_is_hidden, story.run_style, story.run_fonts = None, "", None

    def _start_paragraph(self, _: Attributes) -> None:
        story = self._stories[-1]
        if story.pieces and not story.goes_on:
            self._end_block(story)
        story.style, story.list_id, story.list_level, story.goes_on = "", None, None, False
        self._operator = ""

    def _end_paragraph(self) -> None:
        story = self._stories[-1]
        # The rest of a field whose code never ends is shown.
        story.fields.clear()
        story.codes.clear()
        if not story.goes_on:
            self._end_block(story)
        story.style = ""

    def _end_block(self, story: _Story) -> None:
        """Ends the paragraph, after which the text boxes that are anchored in it follow."""
        text, is_item = "".join(story.pieces).strip("\n").rstrip(), False
        style = self._styles.get(story.style)
        list_id = style.list_id if story.list_id is None else story.list_id
        level = style.list_level if story.list_level is None else story.list_level
        label = None
        if list_id and not story.is_hidden:
            label = self._lists.label(list_id, level, story.style)
        if text.strip():
            if label and label[0]:
                text = f"{label[0]} {text.lstrip()}"
            if style.level:
                text = f"{'#' * style.level} {_on_one_line(text)}"
            elif label:
                text, is_item = "  " * label[1] + text, True
            story.blocks.append((text, is_item))
        story.blocks += story.boxes
        story.pieces, story.boxes = [], []

    def _finished(self, story: _Story) -> list[Block]:
        if story.pieces or story.boxes:
            self._end_block(story)
        return story.blocks

    def _start_story(self) -> None:
        self._stories.append(_Story(is_hidden=not self._is_seen()))

    def _end_box(self) -> None:
        box = self._finished(self._stories.pop())
        self._stories[-1].boxes += box

    # ---------------------------------------------------------------------------------------- tables

    def _start_table(self, _: Attributes) -> None:
        story = self._stories[-1]
        story.goes_on = False
        if story.pieces:
            self._end_block(story)
        self._tables.append(_Table())

    def _end_table(self) -> None:
        table = self._tables.pop()
        table.end_lines()
        self._stories[-1].blocks += table.blocks

    def _start_row(self, _: Attributes) -> None:
        if self._tables:
            table = self._tables[-1]
            table.cells, table.row_is_deleted, table.num_rows = [], False, table.num_rows + 1

    def _end_cell(self) -> None:
        self._deadline.check()
        cell = self._finished(self._stories.pop())
        if self._tables:
            self._tables[-1].cells.append(cell)

    def _end_row(self) -> None:
        if not self._tables:
            return
        table = self._tables[-1]
        cells, table.cells = table.cells, []
        if table.row_is_deleted:
            return
        if len(cells) == 1:
            # Such tables are frames around text.
            table.end_lines()
            table.blocks += cells[0]
        else:
            table.lines.append(" | ".join(_on_one_line(" ".join(text for text, _ in cell)) for cell in cells))

    # ---------------------------------------------------------------------------------------- notes

    def _start_note(self, attributes: Attributes) -> None:
        self._note = attribute(attributes, "id")
        self._start_story()

    def _end_note(self) -> None:
        self.notes[self._note] = self._finished(self._stories.pop())


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
