"""Fields, forms and signs of a Word file, which no run holds as text, are read as its page shows them."""

import pytest
from reading import contents, left_out
from word_files import BEGIN, END, SEPARATE, field, paragraph, run, write_word


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
