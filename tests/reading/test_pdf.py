"""PDF files are read page by page; what is damaged, encrypted, scanned or dangerous is left out in bounded time."""

import logging
import sys
import zlib

import pypdf
import pytest
from pace import at_most
from reading import contents, left_out, write_file


def make_pdf(*pages: bytes, resources: bytes = b"", objects: tuple[bytes, ...] = ()) -> bytes:
    """Makes a PDF file with these contents of pages; `objects` have the numbers from 10."""
    numbers = range(100, 100 + 2 * len(pages), 2)
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    bodies = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(pages), kids),
        3: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
        **dict(enumerate(objects, start=10)),
    }
    for number, page in zip(numbers, pages, strict=True):
        bodies[number] = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents %d 0 R/Resources<</Font<</F 3 0 R>>%s>>>>"
            % (number + 1, resources)
        )
        bodies[number + 1] = stream(page)
    data, offsets = b"%PDF-1.4\n", {}
    for number, body in bodies.items():
        offsets[number] = len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%d 1\n%010d 00000 n \n" % entry for entry in offsets.items())
    return data + b"xref\n%strailer<</Root 1 0 R/Size 9999>>\nstartxref\n%d\n%%%%EOF" % (table, len(data))


def stream(data: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(data, 9)
    return b"<</Length %d/Filter/FlateDecode%s>>stream\n%s\nendstream" % (len(packed), entries, packed)


def page(*lines: str) -> bytes:
    shown = b" ".join(b"(%s) Tj T*" % line.encode("cp1252") for line in lines)
    return b"BT /F 12 Tf 14 TL 50 700 Td " + shown + b" ET"


def test_pages_are_read_in_order(tmp_path):
    path = write_file(tmp_path, "a.pdf", make_pdf(page("Smörgås", "Lentils."), page(), page("Serve.")))
    assert contents(path) == ["Smörgås\nLentils.\n\nServe."]


def test_a_file_without_text_is_left_out(folder):
    write_file(folder, "a.pdf", make_pdf(b"0 0 m 100 100 l S"))
    assert left_out(folder)["a.pdf"].startswith("no text, perhaps scanned pages")


def test_without_pypdf_the_reason_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    write_file(folder, "a.pdf", make_pdf(page("Soup")))
    assert left_out(folder) == {"a.pdf": "needs pypdf; install it with: pip install 'sebp-edge[pdf]'"}


@pytest.mark.parametrize("password", ["secret", ""])
def test_an_encrypted_file_is_left_out_unless_it_opens_without_a_password(folder, password):
    write_file(folder, "plain.pdf", make_pdf(page("Soup.")))
    writer = pypdf.PdfWriter(clone_from=folder / "plain.pdf")
    (folder / "plain.pdf").unlink()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(folder / "a.pdf")
    expected = {"a.pdf": "encrypted; save it without a password to use it"} if password else {}
    assert left_out(folder) == expected


@pytest.mark.slow
def test_damaged_files_are_left_out_and_nothing_is_logged(folder, caplog, capfd):
    whole = make_pdf(page("Soup."), page("Stew."))
    assert logging.getLogger("pypdf").propagate
    for cut in range(1, len(whole), len(whole) // 40):
        write_file(folder, "a.pdf", whole[:cut])
        write_file(folder, "b.pdf", whole[:cut] + b"\xff<<[(" + whole[cut + 5 :])
        for reason in left_out(folder).values():
            assert reason.startswith(("damaged", "no text", "encrypted"))
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")
    assert logging.getLogger("pypdf").propagate


@pytest.mark.slow
def test_a_bomb_is_left_out(folder):
    write_file(folder, "a.pdf", make_pdf(page("a" * 500) * 100_000))
    assert (folder / "a.pdf").stat().st_size < 1_000_000
    with at_most(10):
        assert "a.pdf" in left_out(folder)


@pytest.mark.slow
def test_a_file_that_takes_too_long_is_left_out(folder, take_at_most):
    take_at_most("pdf", 1)
    # Each form shows the next one ten times.
    forms = [
        stream(b"/X Do " * 10, b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X %d 0 R>>>>" % number)
        for number in range(11, 20)
    ]
    last = stream(page("x"), b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</Font<</F 3 0 R>>>>")
    data = make_pdf(page("x") + b" /X Do", resources=b"/XObject<</X 10 0 R>>", objects=(*forms, last))
    write_file(folder, "a.pdf", data)
    with at_most(10):
        assert left_out(folder) == {"a.pdf": "its text takes longer than 1 seconds to read; split it to use it"}
