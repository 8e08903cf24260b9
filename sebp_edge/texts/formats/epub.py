"""Reads electronic books (.epub): the text of their chapters in the order of the book, without tables of contents."""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sebp_edge.texts.documents import NotRead, Unreadable
from sebp_edge.texts.formats.encodings import decode_page
from sebp_edge.texts.formats.html import html_text
from sebp_edge.texts.formats.xml_parts import Attributes, Handler, Package, attribute, open_package

_DAMAGED = "damaged, or not an electronic book (EPUB)"
_PAGES = {"application/xhtml+xml", "text/html", "text/x-oeb1-document", "application/x-dtbook+xml"}
# Fonts are only disguised, by these methods; all others lock the text.
_OF_FONTS = {"http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"}


def read_epub(path: Path) -> Iterator[str | NotRead]:
    """Yields the text of a book, and what of it was not read.

    Raises:
        Unreadable: it is damaged, locked (DRM) or too large, or has no text.
    """
    with open_package(path, _DAMAGED) as package:
        locks, container = _Found("EncryptionMethod", "Algorithm"), _Found("rootfile", "full-path")
        package.read("META-INF/encryption.xml", locks)
        if set(locks.values) - _OF_FONTS:
            raise Unreadable("locked by its seller (DRM); only books without a lock are read")
        package.read("META-INF/container.xml", container)
        if not container.values or container.values[0] not in package:
            raise Unreadable(_DAMAGED)
        book = _Book(posixpath.dirname(container.values[0]))
        package.read(container.values[0], book)
        text = "\n\n".join(filter(None, _chapters(package, book)))
    if not text:
        raise Unreadable("no text, perhaps pages that are pictures")
    yield text
    for what, number in (("pictures", book.num_pictures), ("chapters that are missing or no pages", book.num_missing)):
        if number:
            yield NotRead(f"{what}: {number:,}")


def _chapters(package: Package, book: "_Book") -> Iterator[str]:
    """Yields the text of each chapter; counts those that are missing."""
    for id in dict.fromkeys(book.spine):
        name, kind = book.parts.get(id, ("", ""))
        if name in book.contents:
            continue
        if kind not in _PAGES or name not in package:
            book.num_missing += 1
            continue
        package.deadline.check()
        with package.open(name) as file:
            page = file.read()
        if page.strip():
            yield html_text(decode_page(page))


class _Found(Handler):
    """Collects one attribute of the elements with a name."""

    def __init__(self, name: str, attribute: str):
        self._name, self._attribute = name, attribute
        self.values: list[str] = []

    def start(self, name: str, attributes: Attributes) -> None:
        if name == self._name:
            self.values.append(attribute(attributes, self._attribute))


class _Book(Handler):
    """Handles the part that lists the others.

    Attributes:
        parts: the name and the type of each part, by its id.
        spine: the ids of the chapters in their order.
        contents: the names of tables of contents.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self.parts: dict[str, tuple[str, str]] = {}
        self.spine: list[str] = []
        self.contents: set[str] = set()
        self.num_pictures = self.num_missing = 0

    def start(self, name: str, attributes: Attributes) -> None:
        if name == "item":
            part, kind = self._part(attributes), attribute(attributes, "media-type").lower()
            self.parts[attribute(attributes, "id")] = part, kind
            self.num_pictures += kind.startswith("image/")
            if "nav" in attribute(attributes, "properties").split():
                self.contents.add(part)
        elif name == "itemref":
            self.spine.append(attribute(attributes, "idref"))
        elif name == "reference" and attribute(attributes, "type").lower() == "toc":
            self.contents.add(self._part(attributes))

    def _part(self, attributes: Attributes) -> str:
        address = unquote(urlsplit(attribute(attributes, "href")).path)
        return posixpath.normpath(posixpath.join(self._folder, address))
