"""Word files that are damaged, dangerous or too large are left out, and take little time and memory."""

import random
import zipfile

import docx
import pytest
from pace import at_most
from reading import MEMORY_PER_BYTE, MIN_SIZE, contents, is_count_of_words, left_out, read_texts, write_file
from word_files import NAMES, PARTS, paragraph, row, write_word

from sebp_edge.errors import MachineError


@pytest.fixture
def path(tmp_path):
    """A Word file as python-docx writes it."""
    document = docx.Document()
    document.add_paragraph("Cook the lentils. " * 9)
    document.save(str(tmp_path / "a.docx"))
    return tmp_path / "a.docx"


def rewrite(path, folder, data) -> None:
    """Copies a Word file into a folder with another main part."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / "a.docx", "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info, data if info.filename == "word/document.xml" else source.read(info))


def test_the_text_counts_towards_the_memory_once_it_is_unpacked(path):
    size = max(MIN_SIZE, len(contents(path)[0]))
    assert read_texts(path, memory=MEMORY_PER_BYTE * size).documents
    with pytest.raises(MachineError):
        read_texts(path, memory=MEMORY_PER_BYTE * size - 1)


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
    rewrite(path, folder, data)
    assert left_out(folder) == {"a.docx": "damaged, or not a Word file"}


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
    rewrite(path, folder, xml)
    assert (folder / "a.docx").stat().st_size < 200_000
    assert left_out(folder)["a.docx"].startswith(reason)


def test_other_kinds_of_compression_are_refused(folder):
    with zipfile.ZipFile(folder / "a.docx", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", f"<w:document {NAMES}><w:body>{paragraph('a')}</w:body></w:document>")
    assert left_out(folder) == {"a.docx": "damaged, or not a Word file"}


ELEMENTS = (  # noqa: SIM905
    "p r t br tbl tr tc sdt ins del txbxContent AlternateContent Choice Fallback pPr rPr trPr tcPr dPr naryPr vanish "
    "numPr numId vMerge rPrChange fldChar d den sup rt ruby footnote footnoteReference body abstractNum num lvl style"
).split()


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
    take_at_most("xml_parts", 0.2)
    write_word(folder, f"<w:tbl><w:tr><w:tc>{unit * 1_000_000}</w:tc></w:tr></w:tbl>")
    with at_most(5):
        assert left_out(folder) == {"a.docx": "its text takes longer than 0.2 seconds to read; split it to use it"}
