"""Word files are read in the order of their paragraphs and tables; what is damaged or dangerous is left out."""

import sys
import zipfile

import docx
import pytest
from reading import contents, left_out, write_file

from sebp_edge.errors import MachineError
from sebp_edge.texts.readers import MEMORY_PER_BYTE, MIN_SIZE, read_texts


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


def test_without_python_docx_the_reason_says_what_to_install(path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "docx", None)
    path.rename(folder / "a.docx")
    assert left_out(folder) == {"a.docx": "needs python-docx; install it with: pip install 'sebp-edge[docx]'"}


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


@pytest.mark.parametrize(("name", "size"), [("word/document.xml", 9_000_000), ("word/media/image1.png", 257_000_000)])
def test_a_bomb_is_left_out_before_it_is_unpacked(path, folder, name, size):
    rewrite(path, folder, **{name: bytes(size)})
    assert (folder / "a.docx").stat().st_size < 1_000_000
    assert left_out(folder) == {"a.docx": "too large once unpacked; split it to use it"}
