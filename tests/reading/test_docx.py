"""Word files are read as a person sees them."""

import zipfile

import docx
import pytest
from reading import contents, left_out
from word_files import NAMES, STRICT, cell, field, paragraph, row, run, table, write_word


def test_paragraphs_headings_and_tables_are_read_in_order(tmp_path):
    document = docx.Document()
    document.add_heading("Soup", level=2)
    document.add_paragraph("Cook the ").add_run("lentils").bold = True
    cells = [each for row in document.add_table(2, 2).rows for each in row.cells]
    for each, text in zip(cells, ["What", "How\nmuch", "Salt", "5 g"], strict=True):
        each.text = text
    document.add_paragraph("   ")
    document.add_paragraph("Serve.")
    document.save(str(tmp_path / "a.docx"))
    assert contents(tmp_path / "a.docx") == ["## Soup\n\nCook the lentils\n\nWhat | How much\nSalt | 5 g\n\nServe."]


def test_a_file_without_text_is_left_out(folder):
    docx.Document().save(str(folder / "a.docx"))
    assert left_out(folder) == {"a.docx": "empty"}


BOX = "<w:r><{0}><w:txbxContent>" + paragraph("Boxed") + "</w:txbxContent></{0}></w:r>"
SEEN = {
    "a content control": (
        f"<w:sdt><w:sdtPr><w:alias/></w:sdtPr><w:sdtContent>{paragraph('a')}</w:sdtContent></w:sdt>",
        "a",
    ),
    "one in a paragraph": (paragraph(f"{run('a ')}<w:sdt><w:sdtContent>{run('b')}</w:sdtContent></w:sdt>"), "a b"),
    "one around rows": (f"<w:tbl><w:sdt><w:sdtContent>{row('a', 'b')}</w:sdtContent></w:sdt></w:tbl>", "a | b"),
    "one around a cell": (
        f"<w:tbl><w:tr>{cell('a')}<w:sdt><w:sdtContent>{cell('b')}</w:sdtContent></w:sdt></w:tr></w:tbl>",
        "a | b",
    ),
    "an insertion": (
        paragraph(f"<w:ins>{run('new')}</w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del>"),
        "new",
    ),
    "what was moved": (
        paragraph(f"<w:moveFrom>{run('a ')}</w:moveFrom>{run('b ')}<w:moveTo>{run('a')}</w:moveTo>"),
        "b a",
    ),
    "a deleted row": (
        f"<w:tbl>{row('a', 'b')}{row('c', 'd').replace('<w:tr>', '<w:tr><w:trPr><w:del/></w:trPr>')}</w:tbl>",
        "a | b",
    ),
    "a deleted end of a paragraph": (
        paragraph("a", "<w:rPr><w:del/></w:rPr>") + paragraph("b") + paragraph("c"),
        "ab\n\nc",
    ),
    "what was formatted otherwise before": (
        paragraph(run("a", "<w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange>")),
        "a",
    ),
    "tags and links": (
        paragraph(
            f"<w:smartTag>{run('a ')}</w:smartTag><w:customXml>{run('b ')}</w:customXml><w:hyperlink>{run('c ')}"
            f"</w:hyperlink><w:fldSimple w:instr='DATE'>{run('d ')}</w:fldSimple><w:bdo>{run('e')}</w:bdo>"
        ),
        "a b c d e",
    ),
    "the result of a field": (paragraph(run("p. ") + field("PAGEREF x", run("7")) + run(".")), "p. 7."),
    "a field in the code of another": (paragraph(field("IF " + field("PAGE", run("9")), run("yes"))), "yes"),
    "what follows a field without an end": (
        paragraph('<w:r><w:fldChar w:fldCharType="begin"/></w:r>') + paragraph("a"),
        "a",
    ),
    "a text box, once": (
        paragraph(
            f"{run('a')}<mc:AlternateContent><mc:Choice Requires='wps'>{BOX.format('w:drawing')}</mc:Choice>"
            f"<mc:Fallback>{BOX.format('w:pict')}</mc:Fallback></mc:AlternateContent>{run(' b')}"
        ),
        "a b\n\nBoxed",
    ),
    "a text box for older programs only": (
        paragraph(
            f"<mc:AlternateContent><mc:Choice/><mc:Fallback>{BOX.format('w:pict')}</mc:Fallback></mc:AlternateContent>"
        ),
        "Boxed",
    ),
    "a table in a table": (table(row("a", table(row("b", "c")) + paragraph("d"))), "a | b | c d"),
    "a table as a frame": (table(row(paragraph("a") + paragraph("b") + table(row("c", "d")))), "a\n\nb\n\nc | d"),
    "a merged cell, once": (
        table(
            row(cell("a", "<w:gridSpan w:val='2'/>"), cell("b", "<w:vMerge w:val='restart'/>")),
            row("c", "d", cell("", "<w:vMerge/>")),
        ),
        "a | b\nc | d | ",
    ),
    "merged cells without a first one": (
        table(row("a", "b").replace("<w:tc>", "<w:tc><w:tcPr><w:vMerge/><w:hMerge/></w:tcPr>", 1), row("c", "d")),
        "a | b\nc | d",
    ),
    "no hidden text": (paragraph(run("a") + run("b", "<w:vanish/>") + run("c", "<w:vanish w:val='0'/>")), "ac"),
    "characters": (
        paragraph(
            "<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t><w:noBreakHyphen/><w:t>d</w:t><w:softHyphen/>"
            "<w:t>e</w:t><w:sym w:font='Symbol' w:char='F061'/><w:sym w:font='Wingdings' w:char='F0FE'/>"
            "<w:sym w:font='Arial' w:char='00E9'/><w:sym w:font='Odd' w:char='x'/></w:r>"
        ),
        "a\tb\nc-deα☑é",
    ),
    "readings": (
        paragraph(f"<w:r><w:ruby><w:rt>{run('reading')}</w:rt><w:rubyBase>{run('base')}</w:rubyBase></w:ruby></w:r>"),
        "base(reading)",
    ),
    "a formula": (
        paragraph(
            "<m:oMath><m:f><m:num><m:r><m:t>a</m:t></m:r></m:num><m:den><m:d><m:e><m:r><m:t>b+c</m:t></m:r></m:e></m:d>"
            "</m:den></m:f><m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup></m:oMath>"
        ),
        "a/(b+c)x^2",
    ),
    "a large initial": (paragraph("O", "<w:framePr w:dropCap='drop'/>") + paragraph("nce"), "Once"),
    "word art": (paragraph("<w:r><w:pict><v:shape><v:textpath string='Art'/></v:shape></w:pict></w:r>"), "Art"),
    "text beside paragraphs": (run("a") + paragraph("b"), "a\n\nb"),
}


@pytest.mark.parametrize("kind", SEEN)
def test_what_a_person_sees_is_read(tmp_path, kind):
    body, text = SEEN[kind]
    assert contents(write_word(tmp_path, body)) == [text.strip()]


@pytest.mark.parametrize("name", ["a.docm", "a.DOTX", "a.dotm"])
def test_related_and_strict_files_are_read(tmp_path, name):
    assert contents(write_word(tmp_path, paragraph("a"), name, STRICT)) == ["a"]


def test_the_main_part_may_have_any_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr("text/main.xml", f"<w:document {NAMES}><w:body>{paragraph('a')}</w:body></w:document>")
        archive.writestr(
            "_rels/.rels",
            '<Relationships xmlns="x"><Relationship Id="a" Target="/text/main.xml" '
            'Type="http://purl.oclc.org/ooxml/officeDocument/relationships/officeDocument"/></Relationships>',
        )
    assert contents(tmp_path) == ["a"]


def test_headings_and_hidden_text_follow_their_styles(tmp_path):
    styles = (
        "<w:style w:styleId='H'><w:name w:val='heading 2'/></w:style>"
        "<w:style w:styleId='Own'><w:basedOn w:val='H'/></w:style>"
        "<w:style w:styleId='Loop'><w:basedOn w:val='Loop'/></w:style>"
        "<w:style w:styleId='Secret'><w:rPr><w:vanish/></w:rPr></w:style>"
    )
    body = (
        paragraph("a", "<w:pStyle w:val='Own'/>")
        + paragraph("b", "<w:pStyle w:val='Loop'/>")
        + paragraph("c", "<w:pStyle w:val='Secret'/>")
        + f"<w:tbl>{row('d', 'e')}</w:tbl>"
        + paragraph(run("f", "<w:rStyle w:val='Secret'/>") + run("g"))
    )
    assert contents(write_word(tmp_path, body, styles=styles)) == ["## a\n\nb\n\nd | e\n\ng"]


def test_items_of_lists_have_their_numbers(tmp_path):
    levels = "".join(
        f"<w:lvl w:ilvl='{level}'><w:numFmt w:val='{kind}'/><w:lvlText w:val='{label}'/></w:lvl>"
        for level, kind, label in [(0, "decimal", "%1."), (1, "lowerLetter", "%1.%2)"), (2, "bullet", "x")]
    )
    lists = (
        f"<w:abstractNum w:abstractNumId='5'>{levels}</w:abstractNum>"
        "<w:num w:numId='1'><w:abstractNumId w:val='5'/></w:num>"
        "<w:num w:numId='2'><w:abstractNumId w:val='5'/><w:lvlOverride w:ilvl='0'><w:startOverride w:val='7'/>"
        "</w:lvlOverride></w:num>"
    )
    body = "".join(
        paragraph(text, f"<w:numPr><w:ilvl w:val='{level}'/><w:numId w:val='{number}'/></w:numPr>")
        for text, level, number in zip("abcdefg", (0, 1, 1, 2, 0, 0, 0), (1, 1, 1, 1, 1, 2, 0), strict=True)
    )
    assert contents(write_word(tmp_path, body, numbering=lists)) == [
        "1. a\n  1.a) b\n  1.b) c\n    - d\n2. e\n7. f\n\ng"
    ]


def test_footnotes_and_endnotes_follow_the_text_once(tmp_path):
    body = paragraph(
        run("a")
        + "<w:r><w:footnoteReference w:id='2'/></w:r>"
        + run(" b")
        + "<w:r><w:endnoteReference w:id='2'/></w:r>"
    ) + paragraph("<w:r><w:footnoteReference w:id='2'/></w:r>")
    footnotes = "".join(
        f"<w:footnote w:id='{id}'>{paragraph(text)}</w:footnote>" for id, text in [(0, "-"), (2, " one")]
    )
    endnotes = f"<w:endnote w:id='2'>{paragraph('two')}</w:endnote>"
    assert contents(write_word(tmp_path, body, footnotes=footnotes, endnotes=endnotes)) == [
        "a[^1] b[^2]\n\n[^1]\n\n[^1]: one\n[^2]: two"
    ]


def test_diagrams_and_charts_are_named_as_not_read(folder):
    write_word(folder, paragraph("a") + paragraph("<w:r><w:drawing><dgm:relIds/><c:chart/></w:drawing></w:r>"))
    assert left_out(folder) == {"a.docx": "diagrams and charts: 2"}


def test_inserted_files_are_named_as_not_read(folder):
    write_word(folder, paragraph("a") + "<w:altChunk/>" + paragraph("<w:subDoc/>"))
    assert left_out(folder) == {"a.docx": "inserted files, which are read once you save this one in Word: 2"}
