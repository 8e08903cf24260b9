"""Decodes the bytes of a text file: UTF-8 and UTF-16 by their rules, others as browsers detect them."""

import codecs
import re
import unicodedata
from contextlib import suppress
from pathlib import Path

from turbohtml.detect import Detection, detect

from sebp_edge.values.documents import Unreadable

# Control characters that no text has; DOS ended texts with the one left out.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x19\x1c-\x1f]")
# Signs of English texts in Windows-1252. A detector, which knows letters, finds none or takes "£" for "Ł".
_ENGLISH = re.compile(
    rb"(?:[\x00-\x80\x85\x91-\x97\x99\xa7\xb0\xb7\xd7]|[\xa3\xa9\xae](?![A-Za-z])"
    rb"|(?<![A-Za-z])[\xb1\xbc-\xbe](?![A-Za-z]))*+"
)
# An accented capital after a small letter or before a digit, as in "itÕs" and "Û5": signs of Macs before Mac OS X,
# taken for another encoding's letters. Of so many characters beyond ASCII, one may be a slip of the writer's.
_MISPLACED_CAPITAL, _SLIPS = re.compile("[a-z][À-ÖØ-Þ]|[À-ÖØ-Þ][0-9]"), 20
# A page that names its encoding.
_NAMED = re.compile(rb"<(?:meta|\?xml)\b[^>]*?\b(?:charset|encoding)\s*=", re.IGNORECASE)
_NO_UTF8 = Detection(excluded=frozenset({"UTF-8"}))
# In bytes: where pages name their encoding.
_BEGINNING = 1024
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Of so many bytes or characters of a page, one may be damaged.
_RARE = 1000
# Unicode's categories of control characters, of private characters and of those that are not assigned.
_IN_NO_TEXT = frozenset({"Cc", "Co", "Cn"})


def decode(path: Path) -> str:
    """Returns the text of a file, which is in UTF-8, in UTF-16, or in a detected encoding."""
    return decode_bytes(path.read_bytes())


def utf8_of(path: Path) -> bytes:
    """Returns the text of a file in UTF-8, without decoding one that is; see `decode`."""
    data = path.read_bytes()
    if b"\0" in data or not _is_utf8(data):
        return decode_bytes(data).encode(errors="replace")
    return data.removeprefix(codecs.BOM_UTF8)


def decode_html(path: Path) -> str:
    """Returns the text of a web page, in UTF-8 or the encoding that it names; if it is in neither, as `decode` does.

    Null characters and single damaged characters are no errors, as in browsers.
    """
    data = path.read_bytes()
    if data.startswith(_MARKS):
        return decode_bytes(data)
    if data.count(b"\0") * _RARE < len(data):
        data = data.replace(b"\0", b"")
    # Pages that were saved in UTF-8 often name another encoding.
    if b"\0" not in data and (data.isascii() or not _is_utf8(data)):
        if _is_damaged_utf8(data):
            return _not_empty(data.decode("utf-8", errors="replace"))
        named = detect(data, _NO_UTF8) if _NAMED.search(data[:_BEGINNING]) else None
        text = data.decode(named.codec, errors="replace") if named and named.codec and named.confidence else ""
        if text and text.count("\ufffd") * _RARE <= len(text):
            return _not_empty(text)
    return decode_bytes(data)


def decode_bytes(data: bytes) -> str:
    """Returns the text; see `decode`."""
    # UTF-32's byte order mark can begin like UTF-16's.
    has_mark = data.startswith((b"\xff\xfe", b"\xfe\xff")) and data[2:4] != b"\0\0"
    utf16 = "utf-16" if has_mark else _utf16_without_mark(data)
    if b"\0" in data and not utf16:
        raise Unreadable("binary file")
    try:
        text = data.decode(utf16 or "utf-8")
    except UnicodeDecodeError as error:
        text = None if utf16 or _is_damaged_utf8(data) else _decode_legacy(data)
        if text is None:
            encoding = "UTF-16" if utf16 else "UTF-8"
            raise Unreadable(f"not {encoding} (byte {error.start}); save it as UTF-8 to use it") from error
    return _not_empty(text.removeprefix("\ufeff"))


def _utf16_without_mark(data: bytes) -> str | None:
    """Returns the encoding of UTF-16 without a byte order mark; None if this is not such a text.

    In such a text, each second byte of a blank is zero and no other byte is. A binary file has control characters then.
    """
    if b"\0" not in data or len(data) % 2:
        return None
    for encoding, low in (("utf-16-le", data[::2]), ("utf-16-be", data[1::2])):
        if b"\0" not in low:
            with suppress(UnicodeDecodeError):
                text = data.decode(encoding)
                known = (unicodedata.category(sign) in _IN_NO_TEXT for sign in set(text) - set("\t\n\r\f"))
                return None if any(known) else encoding
    return None


def _not_empty(text: str) -> str:
    # strip() would copy a large text.
    if not text or text.isspace():
        raise Unreadable("empty")
    return text


def _is_utf8(data: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        data.decode()
        return True
    return False


def _is_damaged_utf8(data: bytes) -> bool:
    """Returns whether this is UTF-8 with errors in it: it has the mark, or most of what is beyond ASCII is UTF-8."""
    text = data.decode("utf-8", errors="replace")
    errors = text.count("\ufffd")
    return text.startswith("\ufeff") or len(text) - len(text.encode("ascii", errors="ignore")) > 2 * errors


def _decode_legacy(data: bytes) -> str | None:
    """Returns the text in the encoding before Unicode that fits it best; None if none does."""
    if _CONTROL.search(data):
        return None
    if _ENGLISH.fullmatch(data):
        return data.decode("cp1252")
    # What it says of an encoding is not about itself, or not true.
    found = detect(b" " * _BEGINNING + data, _NO_UTF8)
    if not (found.codec and found.confidence):
        return None
    with suppress(UnicodeDecodeError):
        text = data.decode(found.codec)
        num_accented = len(text) - len(text.encode("ascii", errors="ignore"))
        return text if len(_MISPLACED_CAPITAL.findall(text)) * _SLIPS < num_accented else None
    return None
