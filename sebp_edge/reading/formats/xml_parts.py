"""Reads XML, alone or as the parts of a .zip archive, into a handler within limits of time, size and nesting.

No tree is built: the memory is that of the text, however the file is made.
"""

import html
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import error as StructError
from typing import BinaryIO
from xml.parsers import expat
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile
from zlib import error as ZlibError

from sebp_edge.values.documents import Unreadable

MAX_SECONDS = 20
# Of elements within each other; and of one tag, in bytes, since the parser keeps a tag until it ends.
MAX_DEPTH, MAX_TAG = 500, 4_000_000
# The unpacked size of the parts of one archive that are read, in bytes.
MAX_XML = 64_000_000
# Other decompressors may take any memory.
COMPRESSIONS = (ZIP_STORED, ZIP_DEFLATED)
_CHUNK = 1 << 18

Attributes = dict[str, str]


class Deadline:
    """The time until which a file must be read."""

    def __init__(self):
        self._end = time.monotonic() + MAX_SECONDS

    def check(self) -> None:
        """Raises Unreadable if it has passed."""
        if time.monotonic() > self._end:
            raise Unreadable(f"its text takes longer than {MAX_SECONDS} seconds to read; split it to use it")


class Handler:
    """What is called for the parts of a file. Names are without namespaces, of which some files have others."""

    def start(self, name: str, attributes: Attributes) -> None:
        """An element starts."""

    def end(self, name: str) -> None:
        """An element ends."""

    def text(self, text: str) -> None:
        """A piece of text."""


class Package:
    """The parts of an archive, by their names in lower case."""

    def __init__(self, archive: ZipFile):
        self.deadline = Deadline()
        self._archive, self._size = archive, 0
        self._parts = {info.filename.lower(): info for info in archive.infolist()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._parts

    def read(self, name: str, handler: Handler) -> None:
        """Feeds a part, if there is one, to a handler; see `feed`.

        Raises:
            Unreadable: all parts together are too large.
            ValueError: it is packed by a method that is not read.
        """
        if name not in self:
            return
        info = self._parts[name.lower()]
        if info.compress_type not in COMPRESSIONS:
            raise ValueError
        # Python never unpacks more of a part than the archive says.
        self._size += info.file_size
        if self._size > MAX_XML:
            raise Unreadable("too large once unpacked; split it to use it")
        with self._archive.open(info) as file:
            feed(file, handler, self.deadline)


@contextmanager
def open_package(path: Path, damaged: str) -> Iterator[Package]:
    """Context in which a file's parts are read; what is wrong with one becomes an Unreadable with the given reason."""
    with xml_faults(damaged), path.open("rb") as file, ZipFile(file) as archive:
        yield Package(archive)


@contextmanager
def xml_faults(damaged: str) -> Iterator[None]:
    """Context in which faults of XML and of archives become an Unreadable with the given reason."""
    try:
        yield
    except (BadZipFile, ZlibError, StructError, ValueError, RuntimeError, EOFError) as error:
        raise Unreadable(damaged) from error


def feed(file: BinaryIO, handler: Handler, deadline: Deadline) -> None:
    """Parses XML.

    Raises:
        Unreadable: it is nested too deeply, or takes too long.
        ValueError: it is not well-formed, or declares entities or attributes.
    """
    parser, depth = expat.ParserCreate(), 0
    parser.buffer_text = True
    start_element, end_element = handler.start, handler.end

    def start(name: str, attributes: Attributes) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise Unreadable(f"its elements are nested more than {MAX_DEPTH} deep; split its tables to use it")
        start_element(name.rpartition(":")[2], attributes)

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        end_element(name.rpartition(":")[2])

    def refuse(*_) -> None:
        # A few of them unpack to any size; no program that is read here declares any.
        raise ValueError

    def skipped(name: str, is_parameter: bool) -> None:
        # It is declared in another file, as those of HTML are.
        if not is_parameter:
            handler.text(html.unescape(f"&{name};"))

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, handler.text
    parser.EntityDeclHandler = parser.AttlistDeclHandler = refuse
    parser.SkippedEntityHandler = skipped
    size = 0
    try:
        while chunk := file.read(_CHUNK):
            deadline.check()
            parser.Parse(chunk)
            size += len(chunk)
            if size - parser.CurrentByteIndex > MAX_TAG:
                raise ValueError
        parser.Parse(b"", True)
    except (IndexError, KeyError):
        raise  # A fault of the handler.
    except (expat.ExpatError, LookupError) as error:  # An unknown encoding is one of the latter.
        raise ValueError from error


def attribute(attributes: Attributes, name: str = "val", default: str = "") -> str:
    """Returns an attribute by its name without a namespace."""
    return next((value for key, value in attributes.items() if key.rpartition(":")[2] == name), default)


def is_on(attributes: Attributes) -> bool:
    """Returns whether a property that is on by its presence is not turned off."""
    return attribute(attributes) not in ("0", "false", "off")


def number(attributes: Attributes, name: str = "val", default: int = 0) -> int:
    """Returns an attribute as a number of at most six digits, or the default."""
    value = attribute(attributes, name)
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else default
