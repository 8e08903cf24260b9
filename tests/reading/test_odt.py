"""OpenDocument texts are read as a person sees them; what is damaged or dangerous is left out."""

import zipfile

import pytest
from reading import assert_survives, contents, left_out, read_all, write_file

NAMES = " ".join(
    f'xmlns:{name}="urn:{name}"' for name in ("office", "text", "style", "table", "draw", "fo", "dc", "svg", "manifest")
)
DAMAGED = "damaged, or not an OpenDocument text"


def content(body: str, styles: str = "") -> str:
    styles = f"<office:automatic-styles>{styles}</office:automatic-styles>"
    return (
        f"<office:document-content {NAMES}>{styles}<office:body><office:text>{body}</office:text></office:body>"
        "</office:document-content>"
    )


def odt(path, body: str, styles: str = "", **parts: str):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        for name, text in {"content.xml": content(body, styles), **parts}.items():
            archive.writestr(name, text)
    return path


def read(path) -> str:
    [text] = contents(path)
    return text


def test_headings_paragraphs_and_blanks_are_read(tmp_path):
    body = (
        '<text:h text:outline-level="2">The\n  soup</text:h><text:p/><text:p>Cook <text:span>the </text:span>'
        'pot.<text:line-break/>Stir<text:s text:c="3"/>it<text:tab/>now</text:p><text:p>größer 今日は</text:p>'
    )
    assert read(odt(tmp_path / "a.odt", body)) == "## The soup\n\nCook the pot.\nStir   it\tnow\n\ngrößer 今日は"


def test_lists_have_their_numbers(tmp_path):
    styles = (
        '<text:list-style style:name="L"><text:list-level-style-number text:level="1" style:num-format="1" '
        'text:start-value="3"/><text:list-level-style-bullet text:level="2"/></text:list-style>'
    )
    item = "<text:list-item><text:p>{}</text:p>{}</text:list-item>"
    inner = f"<text:list>{item.format('oil', '')}</text:list>"
    body = (
        f'<text:list text:style-name="L">{item.format("salt", inner)}{item.format("pot", "")}</text:list>'
        f'<text:p>Then</text:p><text:list text:style-name="L" text:continue-numbering="true">{item.format("lid", "")}'
        "</text:list>"
    )
    assert read(odt(tmp_path / "a.odt", body, styles)) == "3. salt\n  - oil\n4. pot\n\nThen\n\n5. lid"


def test_tables_notes_and_text_boxes_are_read(tmp_path):
    row = "<table:table-row>{}</table:table-row>"
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    table = row.format(cell.format("a") + cell.format("b")) + row.format(cell.format("c") + cell.format("d"))
    note = (
        "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Of <text:span>Bob</text:span>"
        "</text:p><text:p>too</text:p></text:note-body></text:note>"
    )
    box = "<draw:frame><draw:text-box><text:p>Boxed</text:p></draw:text-box></draw:frame>"
    picture = "<draw:frame><draw:image/><svg:title>unread</svg:title><svg:desc>unread</svg:desc></draw:frame>"
    body = f"<text:p>Soup{note} is {picture}here</text:p><table:table>{table}</table:table><text:p>{box}</text:p>"
    path = odt(tmp_path / "a.odt", body)
    assert read(path) == "Soup[^1] is here\n\na | b\nc | d\n\nBoxed\n\n[^1]: Of Bob too"
    assert left_out(path) == {"a.odt": "pictures and objects: 1"}


def test_deleted_and_hidden_text_and_comments_are_not_learnt(tmp_path):
    styles = (
        '<style:style style:name="T1" style:family="text"><style:text-properties text:display="none"/></style:style>'
        '<style:style style:name="T2" style:family="text" style:parent-style-name="T1"/>'
    )
    deletion = "<text:changed-region><text:deletion><text:p>secret</text:p></text:deletion></text:changed-region>"
    body = (
        f"<text:tracked-changes>{deletion}</text:tracked-changes>"
        '<text:p>Seen<text:change text:change-id="a"/> <text:change-start/>inserted<text:change-end/>'
        "<office:annotation><dc:creator>Bob</dc:creator><text:p>secret</text:p></office:annotation></text:p>"
        '<text:section text:display="none"><text:p>secret</text:p></text:section>'
        '<text:p><text:span text:style-name="T1">secret</text:span>and<text:span text:style-name="T2">x</text:span>'
        ' on<text:hidden-text text:is-hidden="true" text:string-value="secret">secret</text:hidden-text></text:p>'
        "<text:table-of-content><text:index-body><text:p>secret</text:p></text:index-body></text:table-of-content>"
    )
    reading = read_all(odt(tmp_path / "a.odt", body, styles))
    assert reading.documents[0].content == "Seen inserted\n\nand on"
    assert [item.reason for item in reading.left_out if "words" not in item.reason] == [
        "comments: 1",
        "deleted texts: 1",
        "hidden texts: 4",
        "tables of contents and indexes: 1",
    ]


def test_styles_of_the_page_do_not_hide_text_and_common_ones_do(tmp_path):
    properties = '<style:text-properties text:display="none"/>'
    style = f'<style:style style:name="{{}}" style:family="paragraph">{properties}</style:style>'
    styles = (
        f"<office:document-styles {NAMES}><office:styles>{style.format('Hidden')}</office:styles>"
        f"<office:automatic-styles>{style.format('P1')}</office:automatic-styles>"
        "<office:master-styles><text:p>header</text:p></office:master-styles></office:document-styles>"
    )
    body = '<text:p text:style-name="P1">Seen</text:p><text:p text:style-name="Hidden">not seen</text:p>'
    assert read(odt(tmp_path / "a.odt", body, **{"styles.xml": styles})) == "Seen"


def test_signs_in_place_of_letters_are_read(tmp_path):
    fonts = (
        '<style:font-face style:name="Symbol1" svg:font-family="Symbol"/>'
        '<style:font-face style:name="W" svg:font-family="\'Wingdings 3\'"/>'
    )
    style = '<style:style style:name="{}" style:family="{}" {}><style:text-properties {}/></style:style>'
    styles = (
        style.format("T1", "text", "", 'style:font-name="Symbol1"')
        + style.format("T2", "text", 'style:parent-style-name="T1"', 'fo:color="#000"')
        + style.format("T3", "text", "", 'style:font-name="Arial"')
        + style.format("P1", "paragraph", "", 'fo:font-family="W"')
    )
    span = '<text:span text:style-name="{}">{}</text:span>'
    body = (
        f"<text:p>A {span.format('T1', chr(0xF0DE))} B{span.format('T2', 'b' + span.format('T3', 'b') + chr(0xF0F0))}"
        f'</text:p><text:p text:style-name="P1">g{span.format("T9", "g")}{span.format("T3", "g")}</text:p>'
    )
    path = odt(tmp_path / "a.odt", body, f"{fonts}{styles}")
    assert read(path) == "A ⇒ Bβb\n\n→→g"
    assert left_out(path) == {"a.odt": "signs without an equivalent in Unicode: 1"}


def test_the_font_of_a_lists_signs_is_not_that_of_the_style_before(tmp_path):
    style = (
        '<style:style style:name="P1" style:family="paragraph"><style:text-properties fo:color="#000"/></style:style>'
    )
    signs = '<text:list-level-style-bullet text:level="1"><style:text-properties style:font-name="Wingdings"/>'
    styles = f'{style}<text:list-style style:name="L1">{signs}</text:list-level-style-bullet></text:list-style>'
    assert read(odt(tmp_path / "a.odt", '<text:p text:style-name="P1">Hello Ada</text:p>', styles)) == "Hello Ada"


def test_text_with_metadata_is_read_and_metadata_are_not(tmp_path):
    body = '<text:p>The <text:meta xml:id="a">map is at ho</text:meta>me<text:meta-field>.</text:meta-field></text:p>'
    path = odt(tmp_path / "a.odt", body)
    assert read(path) == "The map is at home."
    assert left_out(path) == {}
    flat = f"<a {NAMES}><office:meta><dc:title>Title</dc:title></office:meta><office:body><office:text>{body}"
    assert read(write_file(tmp_path, "b.fodt", f"{flat}</office:text></office:body></a>")) == "The map is at home."


def test_a_flat_file_is_read(tmp_path):
    text = content("<text:p>Flat</text:p>").replace("document-content", "document")
    assert read(write_file(tmp_path, "a.fodt", text)) == "Flat"


def test_encrypted_and_other_documents_are_refused(folder):
    entry = f"<manifest:manifest {NAMES}><manifest:encryption-data/></manifest:manifest>"
    odt(folder / "a.odt", "<text:p>a</text:p>", **{"META-INF/manifest.xml": entry})
    odt(folder / "b.odt", "", **{"encrypted-package": "x"})
    with zipfile.ZipFile(folder / "c.odt", "w") as archive:
        archive.writestr("content.xml", "<office:spreadsheet xmlns:office='o'/>")
    write_file(folder, "d.fodt", "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>")
    encrypted = "encrypted; save it without a password to use it"
    assert left_out(folder) == {"a.odt": encrypted, "b.odt": encrypted, "c.odt": DAMAGED, "d.fodt": DAMAGED}


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "<text:p>" * 20_000,
        "<text:list><text:list-item>" * 240 + "<text:p>a</text:p>" + "</text:list-item></text:list>" * 240,
        "<text:p>" + '<text:s text:c="999999"/>' * 5_000 + "a</text:p>",
        "<table:table-row><table:table-cell/>" * 100 + "</table:table-row>" * 100,
        "<text:p>a" + "x" * 1_000_000 + "</text:p>",
    ],
)
def test_hostile_files_are_read_or_refused_in_bounds(tmp_path, folder, body):
    odt(folder / "a.odt", body)
    reading = read_all(folder)
    assert sum(len(str(document.content)) for document in reading.documents) < 64_000_000
    assert all(len(item.reason) < 200 for item in reading.left_out)


def test_damaged_files_are_read_in_part_or_refused(tmp_path, folder):
    whole = odt(tmp_path / "whole", "<text:p>Soup</text:p><text:list><text:list-item/></text:list>").read_bytes()
    assert_survives(folder, "a.odt", whole, 100)
