"""Electronic books are read chapter by chapter, unless they are locked."""

import random
import zipfile

import pytest
from reading import contents, left_out, refusal, write_file

from formats.damage import damage
from sebp_edge.texts.readers import read_all

CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/a.opf"/></rootfiles></container>'
XHTML = "application/xhtml+xml"
ITEMS = (
    f'<item id="two" href="ch%202.xhtml#top" media-type="{XHTML}"/>'
    f'<item id="one" href="ch1.xhtml" media-type="{XHTML}"/>'
    f'<item id="nav" href="nav.xhtml" media-type="{XHTML}" properties="nav"/>'
    f'<item id="toc" href="toc.xhtml" media-type="{XHTML}"/><item id="svg" href="a.svg" media-type="image/svg+xml"/>'
    '<item id="css" href="a.css" media-type="text/css"/>'
)
HEAD = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title>x</title></head>'
PAGE = HEAD + "<body>{}</body></html>"
CHAPTERS = {
    "OEBPS/ch1.xhtml": PAGE.format("<h1>One</h1><p>Soup &amp;<span/> salt</p>"),
    "OEBPS/ch 2.xhtml": PAGE.format("<h1>Two</h1><p>größer</p>").replace("?>", ' encoding="utf-8"?>', 1),
    "OEBPS/nav.xhtml": PAGE.format("<nav><a>unread</a></nav><p>Unread</p>"),
    "OEBPS/toc.xhtml": PAGE.format("<p>Unread</p>"),
}


def book(path, spine=("nav", "toc", "one", "two"), **files: str):
    guide = '<guide><reference type="toc" href="toc.xhtml"/></guide>'
    refs = "".join(f'<itemref idref="{id}"/>' for id in spine)
    opf = f"<package><manifest>{ITEMS}</manifest><spine>{refs}</spine>{guide}</package>"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        parts = {"META-INF/container.xml": CONTAINER, "OEBPS/a.opf": opf, **CHAPTERS, **files}
        for name, text in parts.items():
            archive.writestr(name, text)
    return path


def test_chapters_are_read_in_the_books_order_without_contents(tmp_path):
    path = book(tmp_path / "a.epub")
    assert contents(path) == ["One\n\nSoup & salt\n\nTwo\n\ngrößer"]
    assert left_out(path) == {"a.epub": "pictures: 1"}
    assert contents(book(tmp_path / "b.epub", ["two", "one", "two"])) == ["Two\n\ngrößer\n\nOne\n\nSoup & salt"]


def test_chapters_that_are_missing_are_counted(tmp_path):
    reading = read_all(book(tmp_path / "a.epub", ["one", "gone", "svg"]))
    assert [item.reason for item in reading.left_out][:2] == ["pictures: 1", "chapters that are missing or no pages: 2"]


LOCK = '<encryption><EncryptedData><EncryptionMethod Algorithm="{}"/></EncryptedData></encryption>'


def test_locked_books_are_refused_and_disguised_fonts_are_no_lock(tmp_path):
    lock = {"META-INF/encryption.xml": LOCK.format("http://www.w3.org/2001/04/xmlenc#aes128-cbc")}
    assert "locked by its seller (DRM)" in refusal(book(tmp_path / "a.epub", **lock))
    lock = {"META-INF/encryption.xml": LOCK.format("http://www.idpf.org/2008/embedding")}
    assert len(contents(book(tmp_path / "b.epub", **lock))) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"META-INF/container.xml": "<container/>"},
        {"META-INF/container.xml": CONTAINER.replace("OEBPS", "..")},
        {"OEBPS/a.opf": "<package"},
        {"META-INF/container.xml": "<!DOCTYPE a [<!ENTITY b 'c'>]>" + CONTAINER},
        {"META-INF/container.xml": "<!DOCTYPE a [<!ATTLIST a b CDATA 'c'>]>" + CONTAINER},
        {"META-INF/encryption.xml": "<a"},
    ],
)
def test_damaged_books_are_refused(tmp_path, files):
    assert "damaged, or not an electronic book" in refusal(book(tmp_path / "a.epub", **files))


def test_a_book_of_pictures_has_no_text(tmp_path):
    assert "no text, perhaps pages that are pictures" in refusal(book(tmp_path / "a.epub", ["nav"]))


@pytest.mark.slow
def test_a_bomb_is_not_unpacked(tmp_path):
    path = book(tmp_path / "a.epub", **{"OEBPS/ch1.xhtml": "<p>" + "a" * 70_000_000})
    assert "too large once unpacked" in refusal(path)


def test_damaged_files_are_read_in_part_or_refused(tmp_path):
    whole = book(tmp_path / "whole").read_bytes()
    for seed in range(100):
        path = write_file(tmp_path, "a.epub", whole)
        damage(path, random.Random(seed))
        if path.exists() and path.is_file() and not path.is_symlink():
            assert all("\n" not in item.reason and len(item.reason) < 200 for item in read_all(path).left_out)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
