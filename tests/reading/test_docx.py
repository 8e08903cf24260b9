"""Word files are read as a person sees them; what is damaged or dangerous is left out."""

import random
import zipfile

import docx
import pytest
from pace import at_most
from reading import contents, is_count_of_words, left_out, write_file

from sebp_edge.errors import MachineError
from sebp_edge.reading.formats import xml_parts
from sebp_edge.reading.readers import MEMORY_PER_BYTE, MIN_SIZE, read_texts


@pytest.fixture
def path(tmp_path):
    document = docx.Document()
    document.add_heading("Soup", level=2)
    document.add_paragraph("Cook the ").add_run("lentils").bold = True
    table = document.add_table(2, 2)
    for cell, text in zip(
        [c for row in table.rows for c in row.cells], ["What", "How\nmuch", "Salt", "5 g"], strict=True
    ):
        cell.text = text
    document.add_paragraph("   ")
    document.add_paragraph("Serve.")
    document.save(str(tmp_path / "a.docx"))
    return tmp_path / "a.docx"


def rewrite(path, folder, **members) -> None:
    """Copies a Word file into a folder with other parts."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / "a.docx", "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, members.pop(info.filename, None) or source.read(info))
        for name, data in members.items():
            target.writestr(name, data)


def test_paragraphs_headings_and_tables_are_read_in_order(path):
    assert contents(path) == ["## Soup\n\nCook the lentils\n\nWhat | How much\nSalt | 5 g\n\nServe."]


def test_the_text_counts_towards_the_memory_once_it_is_unpacked(path):
    size = max(MIN_SIZE, len(contents(path)[0]))
    assert read_texts(path, memory=MEMORY_PER_BYTE * size).documents
    with pytest.raises(MachineError):
        read_texts(path, memory=MEMORY_PER_BYTE * size - 1)


def test_a_file_without_text_is_left_out(folder):
    docx.Document().save(str(folder / "a.docx"))
    assert left_out(folder) == {"a.docx": "empty"}


@pytest.mark.parametrize("data", [b"no archive", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), "text\0"])
def test_what_is_no_archive_is_left_out(folder, data):
    write_file(folder, "a.docx", data)
    assert left_out(folder) == {"a.docx": "damaged, or not a Word file"}


def test_an_encrypted_or_old_file_is_left_out(folder):
    write_file(folder, "a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    assert left_out(folder)["a.docx"].startswith("encrypted, or in Word's old format")


def test_damaged_files_are_left_out(path, folder):
    whole = path.read_bytes()
    for cut in range(0, len(whole), len(whole) // 20):
        write_file(folder, "a.docx", whole[:cut] or b"P")
        write_file(folder, "b.docx", whole[:cut] + b"\xff" * 300 + whole[cut + 300 :])
        reasons = left_out(folder)
        assert reasons["a.docx"] == "damaged, or not a Word file"
        assert reasons.get("b.docx", "damaged, or not a Word file") == "damaged, or not a Word file"


@pytest.mark.parametrize("data", ["<a", "<a/>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "\0"])
def test_damaged_xml_is_left_out(path, folder, data):
    rewrite(path, folder, **{"word/document.xml": data})
    assert left_out(folder) == {"a.docx": "damaged, or not a Word file"}


# ---------------------------------------------------------------------------------------------- what a person sees

NAMES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:v="urn:schemas-microsoft-com:vml" xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
)
STRICT = 'xmlns:w="http://purl.oclc.org/ooxml/wordprocessingml/main"'
PARTS = ("styles", "numbering", "footnotes", "endnotes")


def write_word(folder, body: str, name: str = "a.docx", names: str = NAMES, **parts: str):
    """Writes a Word file with the given XML in its body and in other parts; `w` is Word's namespace."""
    path = folder / name
    relations = "".join(f'<Relationship Id="{p}" Type="http://x/{p}" Target="{p}.xml"/>' for p in PARTS)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f"<w:document {names}><w:body>{body}</w:body></w:document>")
        archive.writestr("word/_rels/document.xml.rels", f'<Relationships xmlns="x">{relations}</Relationships>')
        for part, xml in parts.items():
            archive.writestr(f"word/{part}.xml", f"<w:{part} {names}>{xml}</w:{part}>")
    return path


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(content: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{content if content.startswith('<') else run(content)}</w:p>"


def row(*cells: str) -> str:
    return "<w:tr>" + "".join(f"<w:tc>{c if c.startswith('<') else paragraph(c)}</w:tc>" for c in cells) + "</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl>{''.join(rows)}</w:tbl>"


def field(code: str, result: str) -> str:
    begin, separate, end = (f'<w:r><w:fldChar w:fldCharType="{t}"/></w:r>' for t in ("begin", "separate", "end"))
    return f"{begin}<w:r><w:instrText>{code}</w:instrText></w:r>{separate}{result}{end}"


BOX = "<w:r><{0}><w:txbxContent>" + paragraph("Boxed") + "</w:txbxContent></{0}></w:r>"
SEEN = {
    "a content control": (
        f"<w:sdt><w:sdtPr><w:alias/></w:sdtPr><w:sdtContent>{paragraph('a')}</w:sdtContent></w:sdt>",
        "a",
    ),
    "one in a paragraph": (paragraph(f"{run('a ')}<w:sdt><w:sdtContent>{run('b')}</w:sdtContent></w:sdt>"), "a b"),
    "one around rows": (f"<w:tbl><w:sdt><w:sdtContent>{row('a', 'b')}</w:sdtContent></w:sdt></w:tbl>", "a | b"),
    "one around a cell": (
        f"<w:tbl><w:tr><w:tc>{paragraph('a')}</w:tc><w:sdt><w:sdtContent><w:tc>{paragraph('b')}</w:tc></w:sdtContent>"
        "</w:sdt></w:tr></w:tbl>",
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
    "a table in a table": (
        table(row("a", table(row("b", "c")) + paragraph("d"))),
        "a | b | c d",
    ),
    "a table as a frame": (
        table(row(paragraph("a") + paragraph("b") + table(row("c", "d")))),
        "a\n\nb\n\nc | d",
    ),
    "a merged cell, once": (
        "<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val='2'/></w:tcPr>" + paragraph("a") + "</w:tc><w:tc><w:tcPr>"
        "<w:vMerge w:val='restart'/></w:tcPr>"
        + paragraph("b")
        + "</w:tc></w:tr><w:tr><w:tc>"
        + paragraph("c")
        + "</w:tc>"
        "<w:tc>"
        + paragraph("d")
        + "</w:tc><w:tc><w:tcPr><w:vMerge/></w:tcPr>"
        + paragraph("")
        + "</w:tc></w:tr></w:tbl>",
        "a | b\nc | d | ",
    ),
    "merged cells without a first one": (
        table(
            row("a", "b").replace("<w:tc>", "<w:tc><w:tcPr><w:vMerge/><w:hMerge/></w:tcPr>", 1),
            row("c", "d"),
        ),
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
        for text, level, number in [
            ("a", 0, 1),
            ("b", 1, 1),
            ("c", 1, 1),
            ("d", 2, 1),
            ("e", 0, 1),
            ("f", 0, 2),
            ("g", 0, 0),
        ]
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


# ---------------------------------------------------------------------------------------------- hostile files


def test_a_wide_cell_takes_no_time(folder):
    cell = row("a").replace("<w:tc>", "<w:tc><w:tcPr><w:gridSpan w:val='999999999'/></w:tcPr>")
    path = write_word(folder, f"<w:tbl>{cell}</w:tbl>")
    with at_most(2):
        assert contents(path) == ["a"]


TABLES = "<w:tbl><w:tr><w:tc>" * 10_000 + paragraph("a") + "</w:tc></w:tr></w:tbl>" * 10_000
ENTITIES = "<!DOCTYPE a [<!ENTITY b 'bb'><!ENTITY c '&b;&b;'>]>"


@pytest.mark.parametrize(
    ("xml", "reason"),
    [
        (f"<w:document {NAMES}><w:body>{TABLES}</w:body></w:document>", "its elements are nested more than 500 deep"),
        (f"{ENTITIES}<w:document {NAMES}><w:body>{paragraph('&c;')}</w:body></w:document>", "damaged"),
        (f"<w:document {NAMES} a='{'x' * 9_000_000}'><w:body>{paragraph('a')}</w:body></w:document>", "damaged"),
        (bytes(65_000_000), "too large once unpacked; split it to use it"),
    ],
)
def test_a_bomb_is_left_out(path, folder, xml, reason):
    rewrite(path, folder, **{"word/document.xml": xml})
    assert (folder / "a.docx").stat().st_size < 200_000
    assert left_out(folder)["a.docx"].startswith(reason)


def test_other_kinds_of_compression_are_refused(folder):
    with zipfile.ZipFile(folder / "a.docx", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", f"<w:document {NAMES}><w:body>{paragraph('a')}</w:body></w:document>")
    assert left_out(folder) == {"a.docx": "damaged, or not a Word file"}


ELEMENTS = [
    *(
        "p",
        "r",
        "t",
        "br",
        "tbl",
        "tr",
        "tc",
        "sdt",
        "ins",
        "del",
        "txbxContent",
        "AlternateContent",
        "Choice",
        "Fallback",
    ),
    *("pPr", "rPr", "trPr", "tcPr", "dPr", "naryPr", "vanish", "numPr", "numId", "vMerge", "rPrChange", "fldChar"),
    *("d", "den", "sup", "rt", "ruby", "footnote", "footnoteReference", "body", "abstractNum", "num", "lvl", "style"),
]


def soup(draw: random.Random, depth: int) -> str:
    """Returns well-formed XML of Word's elements in any order."""
    pieces = []
    for _ in range(draw.randrange(1, 5)):
        name = draw.choice(ELEMENTS)
        kind = draw.choice(("begin", "separate", "end", "continue", "1"))
        inside = soup(draw, depth - 1) if depth and draw.random() < 0.8 else "text"
        pieces.append(f"<w:{name} w:val='{kind}' w:id='1' w:fldCharType='{kind}'>{inside}</w:{name}>")
    return "".join(pieces)


@pytest.mark.slow
def test_elements_in_any_order_end_in_no_error(tmp_path):
    for seed in range(50):
        draw = random.Random(seed)
        parts = {part: soup(draw, 3) for part in PARTS}
        reading = read_texts([write_word(tmp_path, soup(draw, 7), **parts), "other text"])
        assert all(item.reason == "empty" or is_count_of_words(item) for item in reading.left_out)


@pytest.mark.parametrize("unit", ["<w:r/>", "<w:p/>", "<w:tc/>", "<w:tab/>", "<w:fldChar w:fldCharType='begin'/>"])
def test_the_time_is_limited_within_a_table(folder, take_at_most, unit):
    take_at_most(xml_parts, 0.2)
    write_word(folder, f"<w:tbl><w:tr><w:tc>{unit * 1_000_000}</w:tc></w:tr></w:tbl>")
    with at_most(5):
        assert left_out(folder) == {"a.docx": "its text takes longer than 0.2 seconds to read; split it to use it"}


BEGIN, SEPARATE, END = (f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end"))


def code(text: str) -> str:
    return f'<w:r><w:instrText xml:space="preserve">{text}</w:instrText></w:r>'


def form(code_text: str, data: str, result: str = "") -> str:
    begin = BEGIN.replace("/></w:r>", f"><w:ffData><w:name w:val='x'/>{data}</w:ffData></w:fldChar></w:r>")
    return f"{begin}{code(code_text)}{SEPARATE}{result}{END}"


LIST = "<w:ddList>{}<w:listEntry w:val='barley'/><w:listEntry w:val='leeks &amp; oil'/></w:ddList>"
BOX_TO_TICK = "<w:checkBox><w:sizeAuto/>{}</w:checkBox>"
SHOWN = {
    "a prompt": (f"{BEGIN}{code(' MACROBUTTON NoMacro The tide turns. ')}{END}", "The tide turns."),
    "one in several runs": (
        f"{BEGIN}{code(' MACROBUTTON ')}{code('NoMacro The ')}{code('tide turns')}{END}{run('!')}",
        "The tide turns!",
    ),
    "one with a result of another field in it": (
        f"{BEGIN}{code('GOTOBUTTON x Page ')}{field('PAGEREF x', run('7'))}{code(' please')}{END}",
        "Page 7 please",
    ),
    "a simple one": ("<w:fldSimple w:instr='MACROBUTTON NoMacro The tide turns'/>", "The tide turns"),
    "no hidden prompt": (
        "".join(
            part.replace("<w:r>", "<w:r><w:rPr><w:vanish/></w:rPr>")
            for part in (BEGIN, code("MACROBUTTON x The tide"), END)
        ),
        "",
    ),
    "an entry of a list": (form("FORMDROPDOWN", LIST.format("<w:result w:val='1'/>")), "leeks & oil"),
    "the default one": (form("FORMDROPDOWN", LIST.format("<w:default w:val='1'/>")), "leeks & oil"),
    "the chosen one, not the default one": (
        form("FORMDROPDOWN", LIST.format("<w:result w:val='0'/><w:default w:val='1'/>")),
        "barley",
    ),
    "the first one": (form("FORMDROPDOWN", LIST.format("")), "barley"),
    "no entry that there is not": (form("FORMDROPDOWN", LIST.format("<w:result w:val='9'/>")), ""),
    "an entry once": (form("FORMDROPDOWN", LIST.format(""), run("barley")), "barley"),
    "an empty box": (form("FORMCHECKBOX", BOX_TO_TICK.format("<w:default w:val='0'/>")), "☐"),
    "a ticked box": (form("FORMCHECKBOX", BOX_TO_TICK.format("<w:default w:val='0'/><w:checked/>")), "☒"),
    "one that is not ticked any more": (
        form("FORMCHECKBOX", BOX_TO_TICK.format("<w:default w:val='1'/><w:checked w:val='0'/>")),
        "☐",
    ),
    "what was typed into a field, without its default": (
        form("FORMTEXT", "<w:textInput><w:default w:val='name'/></w:textInput>", run("Anna")),
        "Anna",
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_what_a_page_shows_and_no_run_holds_is_read(tmp_path, kind):
    body, text = SHOWN[kind]
    body = paragraph(run("So it goes. " * 10)) + paragraph(run("See: ") + body)
    assert contents(write_word(tmp_path, body)) == [f"{'So it goes. ' * 10}".rstrip() + f"\n\nSee: {text}".rstrip()]
    assert left_out(tmp_path) == {}


def test_fields_that_word_computes_are_counted(tmp_path):
    fields = (f"{BEGIN}{code(text)}{END}" for text in (" EQ &#92;f(1,2)", "PAGE", "SYMBOL 222 &#92;f Symbol"))
    write_word(tmp_path, paragraph(run("a") + "".join(fields)))
    assert left_out(tmp_path) == {"a.docx": "fields that Word computes: 2"}


def signs(font: str, *codes: str) -> str:
    return "".join(f"<w:r><w:sym w:font='{font}' w:char='{code}'/></w:r>" for code in codes)


FONT = "<w:rFonts w:ascii='{0}' w:hAnsi='{0}'/>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (run("A ") + signs("Symbol", "F0DE") + run(" B"), "A ⇒ B"),
        (signs("Symbol", "F0DB", "F022", "24", "F0C7", "F0CC", "F0D7", "F0BC", "F05C", "F061"), "⇔∀∃∩⊂⋅…∴α"),
        (signs("Wingdings", "F0E0", "F04A", "F0A8"), "→☺☐"),
        (signs("Wingdings 2", "F050", "F052"), "✓☑"),
        (signs("Wingdings 3", "F067", "F070"), "→▲"),
        (signs("Webdings", "F0FE", "F04F"), "🌎👂"),
        (run("b", FONT.format("Symbol")) + run("\uf061\uf0de", FONT.format("Symbol")), "βα⇒"),
        (run("à", FONT.format("Wingdings")) + run("à", FONT.format("Arial")), "→à"),
        (run("αx", FONT.format("Symbol")), "αξ"),
        (run("a\uf0de", "<w:rFonts w:hAnsi='Symbol'/>") + run("b", "<w:rFonts w:hAnsi='Symbol'/>"), "a⇒b"),
        (run("a", "<w:rStyle w:val='Sign'/>") + run("b"), "αb"),
        (run("a", "<w:rStyle w:val='Sign'/>" + FONT.format("Arial")) + run("b", "<w:rStyle w:val='Based'/>"), "aβ"),
    ],
)
def test_signs_in_place_of_letters_are_read(tmp_path, body, text):
    styles = (
        f"<w:style w:styleId='Sign'><w:rPr>{FONT.format('Symbol')}</w:rPr></w:style>"
        "<w:style w:styleId='Based'><w:basedOn w:val='Sign'/></w:style>"
    )
    body = paragraph(body) + paragraph("So it goes. " * 10)
    assert contents(write_word(tmp_path, body, styles=styles)) == [f"{text}\n\n{'So it goes. ' * 10}".strip()]
    assert left_out(tmp_path) == {}


def test_signs_of_a_paragraphs_style_are_read(tmp_path):
    styles = f"<w:style w:styleId='Sign'><w:rPr>{FONT.format('Symbol')}</w:rPr></w:style>"
    body = paragraph(run("a") + run("b", FONT.format("Arial")), "<w:pStyle w:val='Sign'/>") + paragraph(run("c"))
    assert contents(write_word(tmp_path, body, styles=styles)) == ["αb\n\nc"]


def test_signs_that_unicode_does_not_have_are_counted(tmp_path):
    body = run("a") + signs("Symbol", "F0F0") + signs("Odd", "F041") + run("\uf0ff", FONT.format("Wingdings"))
    path = write_word(tmp_path, paragraph(body + run("\uf0ff", FONT.format("Wingdings") + "<w:vanish/>")))
    assert contents(path) == ["a"]
    assert left_out(tmp_path) == {"a.docx": "signs without an equivalent in Unicode: 3"}
