"""Feeds the XML of a Word file to a handler as it is unpacked, within limits of time, size and nesting.

No tree is built: the memory is that of the text, however the file is made.
"""

import time
from typing import BinaryIO
from xml.parsers import expat

from sebp_edge.texts.documents import Unreadable

MAX_SECONDS = 20
# Of elements within each other; and of one tag, in bytes, since the parser keeps a tag until it ends.
MAX_DEPTH, MAX_TAG = 500, 4_000_000
_CHUNK = 1 << 18
DAMAGED = "damaged, or not a Word file"

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
    """What is called for the parts of a file. Names are without namespaces, of which strict files have others."""

    def start(self, name: str, attributes: Attributes) -> None:
        """An element starts."""

    def end(self, name: str) -> None:
        """An element ends."""

    def text(self, text: str) -> None:
        """A piece of text."""


def feed(file: BinaryIO, handler: Handler, deadline: Deadline) -> None:
    """Parses XML.

    Raises:
        Unreadable: it is not well-formed, declares a document type, is nested too deeply, or takes too long.
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
        # Entities are declared there; Word never does.
        raise Unreadable(DAMAGED)

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, handler.text
    parser.StartDoctypeDeclHandler = refuse
    size = 0
    try:
        while chunk := file.read(_CHUNK):
            deadline.check()
            parser.Parse(chunk)
            size += len(chunk)
            if size - parser.CurrentByteIndex > MAX_TAG:
                raise Unreadable(DAMAGED)
        parser.Parse(b"", True)
    except (IndexError, KeyError):
        raise  # A fault of the handler.
    except (expat.ExpatError, LookupError, ValueError) as error:  # An unknown encoding is one of the latter.
        raise Unreadable(DAMAGED) from error


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
