"""Turns the main part of a Word file into text in one pass: what a person sees on the page.

That is also what stands in content controls, tracked insertions, text boxes and the results of fields, or in the codes
of fields that have none. Tracked deletions and hidden text are not seen.
"""

import re
from collections import Counter

from sebp_edge.reading.formats.docx_story import DATA, Field, Formula, Properties, Story, Table
from sebp_edge.reading.formats.docx_styles import Lists, Styles, fonts_of
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
        self._stories: list[Story] = [Story()]
        self._tables: list[Table] = []
        # How many elements around this place are not shown.
        self._skipped = 0
        self._properties, self._formula = Properties(), Formula()
        # The pieces of the current text element, if any.
        self._text: list[str] | None = None
        # The number of texts so far, also when each alternative content began.
        self._num_texts, self._alternatives = 0, []

    def blocks(self) -> list[Block]:
        """Returns the paragraphs and tables of the body."""
        return self._finished(self._stories[0])

    def start(self, name: str, attributes: Attributes) -> None:
        if self._skipped:
            self._skipped += 1
        elif self._properties.of:
            self._start_property(name, attributes)
        elif name in _PROPERTIES:
            self._properties, self._formula.sum = Properties(name), "∫"
        elif name in _NOT_SHOWN or name.endswith("Pr") or (name in _ALTERNATIVES and self._has_alternative()):
            self._skipped = 1
        elif name in ("t", "instrText"):
            self._text = []
        elif name in DATA and self._stories[-1].fields:
            self._stories[-1].fields[-1].read_data(name, attributes)
        elif name in _CHARACTERS:
            self._add(_CHARACTERS[name])
        elif name in _OPERATORS:
            self._formula.operator += _OPERATORS[name]
        else:
            self._open(name, attributes)

    def _open(self, name: str, attributes: Attributes) -> None:
        story = self._stories[-1]
        match name:
            case "r":
                story.end_run()
            case "p":
                self._start_paragraph(story)
            case "fldChar":
                self._field(story, attribute(attributes, "fldCharType"))
            case "fldSimple":
                story.fields.append(Field([attribute(attributes, "instr")], self._num_texts))
            case "tbl":
                story.goes_on = False
                if story.pieces:
                    self._end_block(story)
                self._tables.append(Table())
            case "tr" if self._tables:
                table = self._tables[-1]
                table.cells, table.row_is_deleted, table.num_rows = [], False, table.num_rows + 1
            case "tc" | "txbxContent" | "footnote" | "endnote":
                self._stories.append(Story(is_hidden=not self._is_seen(), note=attribute(attributes, "id")))
            case "footnoteReference" | "endnoteReference" if self._is_seen():
                key = name.removesuffix("Reference"), attribute(attributes, "id")
                self._add(f"[^{self.references.setdefault(key, len(self.references) + 1)}]")
            case "AlternateContent":
                self._alternatives.append(self._num_texts)
            case "sym":
                self._symbol(attributes)
            case "textpath":
                self._add(attribute(attributes, "string"))
            case "rt":
                story.reading_start = len(story.pieces)
            case "d":
                self._formula.operator += "("
                self._formula.brackets.append(")")
            case "altChunk" | "subDoc":
                self._leave_out(_INSERTED)
            case "relIds" | "chart":
                self._leave_out("diagrams and charts")
            case "body":
                self.has_body = True

    def text(self, text: str) -> None:
        if self._text is not None and not self._skipped:
            self._text.append(text)

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
        elif self._properties.of:
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
            self._formula.operator = ""
        else:
            self._close(name)

    def _close(self, name: str) -> None:
        story = self._stories[-1]
        match name:
            case "r":
                story.end_run()
            case "p":
                self._end_paragraph(story)
            case "fldSimple":
                self._end_field(story)
            case "tbl":
                table = self._tables.pop()
                table.end_lines()
                story.blocks += table.blocks
            case "tr" if self._tables:
                self._end_row(self._tables[-1])
            case "tc":
                self._deadline.check()
                cell = self._finished(self._stories.pop())
                if self._tables:
                    self._tables[-1].cells.append(cell)
            case "txbxContent":
                box = self._finished(self._stories.pop())
                self._stories[-1].boxes += box
            case "footnote" | "endnote":
                self.notes[story.note] = self._finished(self._stories.pop())
            case "AlternateContent":
                self._alternatives.pop()
            case "rt":
                # It stands before the word that it is the reading of.
                story.reading = "".join(story.pieces[story.reading_start :])
                del story.pieces[story.reading_start :]
            case "ruby":
                if story.reading:
                    self._add(f"({story.reading})")
                story.reading = ""
            case "d":
                self._add(self._formula.brackets.pop())

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
            story.pieces.append(self._formula.operator + text)
            self._formula.operator = ""
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

    def _field(self, story: Story, kind: str) -> None:
        if kind == "begin":
            story.fields.append(Field())
            story.codes.append(story.fields[-1])
        elif kind == "end":
            self._end_field(story)
        elif story.fields:
            self._end_code(story)

    def _end_code(self, story: Story) -> None:
        if story.fields[-1].num_texts is None:
            story.codes.pop().num_texts = self._num_texts

    def _end_field(self, story: Story) -> None:
        if story.fields:
            self._end_code(story)
            field = story.fields.pop()
            if field.num_texts == self._num_texts:
                if (shown := field.shown()) is None:
                    self._leave_out("fields that Word computes")
                self._add(shown or "")

    # ---------------------------------------------------------------------------------------- properties

    def _start_property(self, name: str, attributes: Attributes) -> None:
        story, properties, formula = self._stories[-1], self._properties, self._formula
        if name.endswith("Change") or name in ("sectPr", "ctrlPr"):
            self._skipped = 1  # How it was before, or nothing about text.
            return
        properties.depth += 1
        match properties.of, name:
            case "pPr", "rPr":
                properties.of, properties.mark = "mark", properties.depth
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
                table = self._tables[-1] if self._tables else Table()
                story.is_hidden |= table.num_rows > 1 if name == "vMerge" else bool(table.cells)
            case "dPr", "begChr":
                formula.operator = formula.operator[:-1] + attribute(attributes)[:1]
            case "dPr", "endChr" if formula.brackets:
                formula.brackets[-1] = attribute(attributes)[:1]
            case "naryPr", "chr":
                formula.sum = attribute(attributes)[:1]

    def _end_property(self, name: str) -> None:
        properties = self._properties
        if not properties.depth:
            properties.of = ""
            if name == "naryPr":
                self._add(self._formula.sum)
            return
        if properties.of == "mark" and properties.depth == properties.mark:
            properties.of = "pPr"
        properties.depth -= 1

    # ---------------------------------------------------------------------------------------- paragraphs

    def _start_paragraph(self, story: Story) -> None:
        if story.pieces and not story.goes_on:
            self._end_block(story)
        story.style, story.list_id, story.list_level, story.goes_on = "", None, None, False
        self._formula.operator = ""

    def _end_paragraph(self, story: Story) -> None:
        # The rest of a field whose code never ends is shown.
        story.fields.clear()
        story.codes.clear()
        if not story.goes_on:
            self._end_block(story)
        story.style = ""

    def _end_block(self, story: Story) -> None:
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

    def _finished(self, story: Story) -> list[Block]:
        if story.pieces or story.boxes:
            self._end_block(story)
        return story.blocks

    @staticmethod
    def _end_row(table: Table) -> None:
        cells, table.cells = table.cells, []
        if table.row_is_deleted:
            return
        if len(cells) == 1:
            # Such tables are frames around text.
            table.end_lines()
            table.blocks += cells[0]
        else:
            table.lines.append(" | ".join(_on_one_line(" ".join(text for text, _ in cell)) for cell in cells))


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
