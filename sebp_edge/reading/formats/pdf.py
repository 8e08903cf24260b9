"""Reads PDF files with pypdf, within limits of time and memory, since a file may be made to exhaust both."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sebp_edge.values.documents import Unreadable

# Of one file, in seconds; and of the text and drawing instructions of a page, in bytes.
MAX_SECONDS, MAX_PAGE = 15, 4_000_000
# Of the text of one file, in characters.
MAX_TEXT = 64_000_000


def read_pdf(path: Path) -> str:
    """Returns the text of a PDF file, page by page."""
    try:
        import pypdf
    except ImportError as error:
        raise Unreadable("needs pypdf; install it with: pip install 'sebp-edge[pdf]'") from error
    try:
        with path.open("rb") as file, _quiet_and_limited(pypdf):
            reader = pypdf.PdfReader(file)
            if reader.is_encrypted and not _opens_without_password(reader, pypdf.errors.DependencyError):
                raise Unreadable("encrypted; save it without a password to use it")
            pages = list(_texts(reader))
    except (OSError, Unreadable):
        raise
    except Exception as error:  # pypdf raises errors of many kinds for what it does not expect.
        raise Unreadable("damaged, or not a PDF file") from error
    if not (text := "\n\n".join(page for page in pages if page)):
        raise Unreadable("no text, perhaps scanned pages; recognise their text first to use it")
    return text


def _opens_without_password(reader, cannot_decrypt: type[Exception]) -> bool:
    """Opens a file that only restricts what may be done with it."""
    try:
        return bool(reader.decrypt(""))
    except (cannot_decrypt, NotImplementedError):
        return False


def _texts(reader) -> Iterator[str]:
    started, size = time.monotonic(), 0

    def stop_if_late(*_) -> None:
        if time.monotonic() - started > MAX_SECONDS:
            raise Unreadable(f"its text takes longer than {MAX_SECONDS} seconds to read; split it to use it")

    for page in reader.pages:
        text = page.extract_text(visitor_operand_before=stop_if_late).strip()
        stop_if_late()  # pypdf goes on after an error within a form.
        size += len(text)
        if size > MAX_TEXT:
            raise Unreadable(f"more than {MAX_TEXT // 1_000_000} million characters; split it to use it")
        yield text


@contextmanager
def _quiet_and_limited(pypdf) -> Iterator[None]:
    """Keeps pypdf from logging, since its messages may quote the file, and from unpacking large streams."""
    logger, silent = logging.getLogger("pypdf"), logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    limits = dict.fromkeys(
        (f"{filter}_maximum_output_length" for filter in ("zlib", "lzw", "run_length", "array_based_stream")), MAX_PAGE
    )
    try:
        with pypdf.apply_configuration(**limits):
            yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)
